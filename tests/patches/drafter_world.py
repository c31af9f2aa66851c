"""The embedding of MTP drafters: a release's own classes load a checkpoint.

    PYTHON_OF_A_RELEASE drafter_world.py

has each drafter class of the DeepSeek family load weights as shipped and, where `drafter_weights`
is for this release, patched by it; prints one JSON object per run. The class, its `load_weights`
and the embedding are vLLM's; the layers around them are stand-ins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)
from vllm.version import __version__

from mtppp_patches.drafter_weights import EMBEDDING, PATCH
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import PatchError, install, vllm_root

RELEASE = __version__.partition("+")[0]

# Module and class, and since when vLLM takes it: the second and third for DeepSeek-V3.2 and GLM-5.2
# on NVIDIA and on AMD.
CLASSES = (
    ("vllm.model_executor.models.deepseek_mtp", "DeepSeekMTP", "0.23.0"),
    ("vllm.models.deepseek_v32.nvidia.mtp", "DeepseekV32MTP", "0.29.0"),
    ("vllm.models.deepseek_v32.amd.mtp", "DeepseekV32MTP", "0.31.0"),
)


def main() -> int:
    # A process is patched for one deployment, and groups are made once: each run has its own.
    fork = multiprocessing.get_context("fork")
    failed = False
    for module, name, since in CLASSES:
        if since > RELEASE:
            continue
        for patched in (False, True) if RELEASE in PATCH.releases else (False,):
            process = fork.Process(target=run, args=(module, name, patched))
            process.start()
            process.join()
            failed = failed or process.exitcode != 0
    return int(failed)


def run(module: str, name: str, patched: bool) -> None:
    """Load a checkpoint that has the embedding once, as the model's, and one that has it not."""
    if patched:
        spec = EngineSpec(
            RELEASE,
            "glm_moe_dsa",
            pipeline=2,
            speculative=Speculative("mtp", 3),
            patches=(PATCH.name,),
        )
        install((PATCH,), spec, RELEASE, vllm_root())
    with tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        with set_current_vllm_config(VllmConfig()):
            initialize_model_parallel(1, 1)
            result = load(getattr(import_module(module), name))
    line = {"release": RELEASE, "class": f"{module}:{name}", "patched": patched, **result}
    print(json.dumps(line), flush=True)


def load(drafter_class: Any) -> dict[str, Any]:
    drafter = drafter_class.__new__(drafter_class)
    nn.Module.__init__(drafter)
    drafter.config = SimpleNamespace(
        n_routed_experts=2,
        n_shared_experts=1,
        num_hidden_layers=4,
        num_nextn_predict_layers=1,
        model_type="glm_moe_dsa",
    )
    drafter.is_fused_shared_expert_enabled = False
    drafter.model = nn.Module()
    drafter.model.mtp_start_layer_idx, drafter.model.num_mtp_layers = 4, 1
    drafter.model.embed_tokens = VocabParallelEmbedding(64, 8)
    layer = nn.Module()
    layer.enorm = nn.LayerNorm(8, bias=False)
    drafter.model.layers = nn.ModuleDict({"4": layer})
    nn.init.constant_(drafter.model.embed_tokens.weight, 7.0)
    rows = torch.arange(512.0).reshape(64, 8)
    weights = [(EMBEDDING, rows), ("model.layers.4.enorm.weight", torch.full((8,), 3.0))]
    drafter.load_weights(iter(weights))
    embedding = torch.equal(drafter.model.embed_tokens.weight[:64], rows)
    others = bool((layer.enorm.weight == 3).all())
    try:
        drafter.load_weights(iter(weights[1:]))
        without = "loads"
    except (PatchError, ValueError) as error:
        without = str(error)
    return {"embedding": embedding, "other_weights": others, "checkpoint_without": without}


if __name__ == "__main__":
    sys.exit(main())
