"""The fused operators of the NVIDIA classes in torch against vLLM's kernels, interpreted.

    PYTHON_OF_A_RELEASE operators_world.py

with Triton's interpreter (TRITON_INTERPRET=1 and `mtppp_cpu`). Prints one JSON object per dtype: by
operator the largest difference, in parts of the largest number.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from mtppp_gpu_classes import operators
from torch import Tensor
from vllm.models.deepseek_v32.common import kernels

TOKENS, HEADS, INDEX_HEADS, HIDDEN, RANK, TOP = 3, 3, 2, 48, 24, 8
BLOCKS, SIZE = 3, 16
SLOTS = torch.tensor([5, -1, 40])
POSITIONS = torch.tensor([0, 7, 30])


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found: dict[str, float] = {}
        for has_indexer, interleave in ((True, True), (True, False), (False, True)):
            torch.manual_seed(1)
            values = inputs(dtype, has_indexer=has_indexer)
            interpreted = outputs(kernels, values, has_indexer, interleave)
            in_torch = outputs(operators, values, has_indexer, interleave)
            for name, output in interpreted.items():
                difference = compare(output, in_torch[name])
                found[name] = max(found.get(name, 0.0), difference)
        print(json.dumps({"dtype": str(dtype), **found}), flush=True)


def inputs(dtype: torch.dtype, *, has_indexer: bool) -> dict[str, Tensor]:
    shapes = {
        "q_c": (TOKENS, RANK),
        "q_w": (RANK,),
        "kv_c": (TOKENS, 512),
        "kv_w": (512,),
        "k_pe": (TOKENS, 64),
        "q_pe": (TOKENS, HEADS, 64),
        "ql_nope": (TOKENS, HEADS, 512),
        "embeds": (TOKENS, HIDDEN),
        "hidden": (TOKENS, HIDDEN),
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
    }
    if has_indexer:
        shapes |= {
            "index_k": (TOKENS, 128),
            "index_q": (TOKENS, INDEX_HEADS, 128),
            "index_weights": (TOKENS, INDEX_HEADS),
        }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def outputs(
    module: Any, values: dict[str, Tensor], has_indexer: bool, interleave: bool
) -> dict[str, Tensor]:
    """What the operators of one implementation return and write, by name."""
    random = torch.Generator().manual_seed(2)
    angles = torch.rand(32, 32, generator=random)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    norm, bias = torch.randn(2, 128, generator=random)
    dtype = values["q_c"].dtype
    latents = torch.zeros(BLOCKS, SIZE, 576, dtype=dtype)
    keys = torch.zeros(BLOCKS, SIZE, 132, dtype=torch.uint8)
    buffer = torch.full((TOKENS, TOP), 7, dtype=torch.int32)
    kv_c, k_pe = torch.zeros_like(values["kv_c"]), torch.zeros_like(values["k_pe"])
    q_c = module.fused_norm_rope(
        POSITIONS,
        values["q_c"],
        values["q_w"],
        1e-5,
        values["kv_c"],
        values["kv_w"],
        1e-5,
        values["k_pe"],
        cos_sin,
        values.get("index_k"),
        norm if has_indexer else None,
        bias if has_indexer else None,
        1e-6,
        cos_sin if has_indexer else None,
        buffer,
        slot_mapping=SLOTS,
        indexer_slot_mapping=SLOTS if has_indexer else None,
        indexer_k_cache=keys if has_indexer else None,
        mla_kv_cache=latents,
        has_indexer=has_indexer,
        index_rope_interleave=interleave,
        kv_c_out=kv_c,
        k_pe_out=k_pe,
    )
    index_q, index_weights, q_pe = module.fused_q(
        POSITIONS,
        values["q_pe"],
        cos_sin,
        values.get("index_q"),
        cos_sin if has_indexer else None,
        values["ql_nope"],
        torch.ones(1),
        values.get("index_weights"),
        0.1,
        0.5,
        has_indexer=has_indexer,
        index_rope_interleave=interleave,
        quantize_mqa=False,
    )
    begun = module.fused_eh_norm(
        POSITIONS, values["embeds"], values["hidden"], values["enorm"], values["hnorm"], 1e-5
    )
    found = {
        "q_c": q_c,
        "kv_c": kv_c,
        "k_pe": k_pe,
        "latents": latents,
        "buffer": buffer,
        "q_pe": q_pe,
        "begun": begun,
    }
    if has_indexer:
        pages = keys.flatten(1)
        found |= {
            "keys": pages[:, : SIZE * 128].view(torch.float8_e4m3fn),
            "key_scales": pages[:, SIZE * 128 :].view(torch.float32),
            "index_q": index_q,
            "index_weights": index_weights,
        }
    return found


def compare(expected: Tensor, found: Tensor) -> float:
    """How far the torch operator's output is from the interpreted kernel's, relative."""
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    kernel, ours = expected.float(), found.float()
    assert bool(kernel.any())
    if expected.dtype == torch.float8_e4m3fn:
        # Only powers of two come out as half of what they are.
        carry_lost = (kernel == ours / 2) & (ours.abs().frexp().mantissa == 0.5)
        kernel = torch.where(carry_lost, ours, kernel)
    return float((kernel - ours).abs().max() / kernel.abs().max())


if __name__ == "__main__":
    main()
