"""The fused operators of vLLM's NVIDIA classes of GLM-5.2, in plain torch.

Each has the arguments and the result of the operator that it stands for, as far as the classes use
it without quantized latents: all is computed in float32 and rounded once, when it is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from mtppp_cpu import sparse, sparse_attention

# What the kernels scale to at least before they quantize.
_LEAST = 1e-4


def fused_norm_rope(
    positions: Tensor,
    q_c: Tensor,
    q_rms_norm_w: Tensor,
    q_rms_eps: float,
    kv_c: Tensor,
    kv_rms_norm_w: Tensor,
    kv_rms_eps: float,
    k_pe: Tensor,
    k_rope_cos_sin_cache: Tensor,
    index_k: Tensor | None,
    index_k_layer_norm_w: Tensor | None,
    index_k_layer_norm_bias: Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: Tensor | None,
    topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None,
    indexer_cache_shuffled: bool = False,
    mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    q_c_out: Tensor | None = None,
    kv_c_out: Tensor | None = None,
    k_pe_out: Tensor | None = None,
    index_k_out: Tensor | None = None,
) -> Tensor:
    """Norms and rotates what a layer makes of its tokens and inserts latents and index keys.

    Clears the rows of the tokens in `topk_indices_buffer` where the layer has an indexer.

    Args:
        positions: [tokens].
        q_c: [tokens, query rank].
        kv_c: [tokens, 512].
        k_pe: [tokens, 64].
        index_k: [tokens, 128], of a layer with an indexer.
        topk_indices_buffer: [tokens or more, top].
        slot_mapping, indexer_slot_mapping: [tokens or fewer], where to insert; negative: nowhere.
        kv_c_out, k_pe_out: are given what goes to the cache.

    Returns:
        `q_c`, normed.
    """
    assert mla_kv_cache_dtype == "auto"
    assert not indexer_cache_shuffled
    assert q_c_out is None
    assert index_k_out is None
    latents = _rms_norm(kv_c, kv_rms_norm_w, kv_rms_eps)
    rotated = _rotate(k_pe.float(), positions, k_rope_cos_sin_cache, interleaved=True)
    if kv_c_out is not None:
        kv_c_out.copy_(latents)
    if k_pe_out is not None:
        k_pe_out.copy_(rotated)
    if mla_kv_cache is not None:
        assert slot_mapping is not None
        rows = torch.cat((latents, rotated), dim=-1)[: slot_mapping.shape[0]]
        sparse.insert_latents(mla_kv_cache, slot_mapping, rows)
    if has_indexer:
        topk_indices_buffer[: positions.shape[0]] = sparse.NONE
    if indexer_k_cache is not None:
        assert index_k is not None
        assert index_k_layer_norm_w is not None
        assert index_k_layer_norm_bias is not None
        assert index_k_rope_cos_sin_cache is not None
        assert slot_mapping is not None
        keys = torch.nn.functional.layer_norm(
            index_k.float(),
            index_k.shape[-1:],
            index_k_layer_norm_w.float(),
            index_k_layer_norm_bias.float(),
            index_k_layer_norm_eps,
        )
        keys = _rotate(keys, positions, index_k_rope_cos_sin_cache, index_rope_interleave)
        slots = slot_mapping if indexer_slot_mapping is None else indexer_slot_mapping
        slots = slots.masked_fill(slot_mapping < 0, -1)
        sparse.insert_keys(indexer_k_cache, slots, keys[: slots.shape[0]])
    return _rms_norm(q_c, q_rms_norm_w, q_rms_eps).to(q_c.dtype)


def fused_q(
    positions: Tensor,
    q_pe: Tensor,
    q_pe_cos_sin_cache: Tensor,
    index_q: Tensor | None,
    index_q_cos_sin_cache: Tensor | None,
    ql_nope: Tensor,
    q_scale: Tensor,
    index_weights: Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Rotates the queries; quantizes those of the indexer, and scales its weights by that.

    Args:
        positions: [tokens].
        q_pe: [tokens, heads, 64].
        index_q: [tokens, index heads, 128], of a layer with an indexer.
        index_weights: [tokens, index heads].

    Returns:
        The indexer's queries [tokens, index heads, 128] in float8 and its weights [tokens, index
        heads] in float32, both None without an indexer, and the rotated `q_pe`.
    """
    assert not quantize_mqa
    rotated = _rotate(q_pe.float(), positions, q_pe_cos_sin_cache, interleaved=True)
    rotated = rotated.to(q_pe.dtype)
    if not has_indexer:
        return None, None, rotated
    assert index_q is not None
    assert index_weights is not None
    assert index_q_cos_sin_cache is not None
    wanted = _rotate(index_q.float(), positions, index_q_cos_sin_cache, index_rope_interleave)
    quantized, scale = sparse.quantize(wanted, floor=_LEAST)
    weights = index_weights.float() * scale[..., 0]
    weights = weights * index_weights_softmax_scale * index_weights_head_scale
    return quantized, weights, rotated


def sparse_attn_indexer(
    hidden_states: Tensor,
    k_cache_prefix: str,
    kv_cache: Tensor,
    q_quant: Tensor,
    q_scale: Tensor | None,
    k: Tensor | None,
    weights: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: Tensor,
    **_: Any,
) -> Tensor:
    """Scores and chooses; the keys are in the cache already."""
    of_layers = get_forward_context().attn_metadata
    if isinstance(of_layers, dict):  # Otherwise a run that only measures memory.
        step = of_layers[k_cache_prefix]
        sparse_attention.choose(step, kv_cache, q_quant, weights, topk_indices_buffer, topk_tokens)
    return topk_indices_buffer


def fused_eh_norm(
    positions: Tensor,
    inputs_embeds: Tensor,
    previous_hidden: Tensor,
    enorm_w: Tensor,
    hnorm_w: Tensor,
    eps: float,
) -> Tensor:
    """What an MTP layer begins with: [tokens, 2 * hidden], embeddings and hidden states, normed."""
    embedded = inputs_embeds.masked_fill(positions[:, None] == 0, 0)
    parts = (_rms_norm(embedded, enorm_w, eps), _rms_norm(previous_hidden, hnorm_w, eps))
    return torch.cat(parts, dim=-1).to(inputs_embeds.dtype)


def _rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = values.float()
    mean = values.square().mean(dim=-1, keepdim=True)
    return values * torch.rsqrt(mean + eps) * weight.float()


def _rotate(values: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """The first numbers of the last dimension turned by position, the others as they are.

    Args:
        values: [tokens, ..., n] float32.
        positions: [tokens].
        cos_sin: [positions, r], cosines and then sines of r / 2 angles.
        interleaved: pairs are neighbours, otherwise the first half with the second.
    """
    turned, rest = values.tensor_split([cos_sin.shape[-1]], dim=-1)
    shape = (-1, *[1] * (values.dim() - 2), cos_sin.shape[-1] // 2)
    cos, sin = (part.reshape(shape) for part in cos_sin[positions].float().chunk(2, dim=-1))
    if interleaved:
        one, other = turned[..., ::2], turned[..., 1::2]
    else:
        one, other = turned.chunk(2, dim=-1)
    pair = (one * cos - other * sin, other * cos + one * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)
