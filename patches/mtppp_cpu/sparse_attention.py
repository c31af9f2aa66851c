"""vLLM's sparse latent attention and its indexer on CPU hosts; `sparse` has what they compute.

How the engine calls them, in a step of `tokens` tokens of several requests:

1. For each KV cache group it has a builder make metadata of query starts, lengths, block tables and
   slots. Latents and index keys are of one group and share block tables; each kind has a backend.
2. In a layer with an indexer the operator gets queries, keys and weights of all tokens, inserts the
   keys, scores, and writes the chosen positions of token t into row t of a buffer that all layers
   of a stage share. A layer without one leaves the buffer alone.
3. The attention of each layer, with or without, inserts the latents of its tokens, reads row t of
   that buffer and attends. All tokens go this way, prompts too: `num_decode_tokens` is all.

A drafter with `index_share_for_mtp_iteration` moves rows within the buffer between its steps and
switches its indexer off; both happen outside.

On CPUs vLLM lacks the first and refuses sparse attention; of the second it has a form for another
model, with other caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla import indexer

from mtppp_cpu import sparse


@dataclass
class SparseMetadata(AttentionMetadata):
    """What attention and indexer need to know of a step.

    Attributes:
        starts: [requests + 1], where each request's tokens begin.
        lengths: [requests], positions of each request, this step's included.
        block_table: [requests, columns].
        slot_mapping: [tokens], where to put what the tokens leave; negative: nowhere.
        request_of: [tokens].
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    request_of: torch.Tensor
    num_prefills: int = 0

    def seen(self, request: int) -> torch.Tensor:
        """How many positions each token of a request sees, its own included."""
        count = int(self.starts[request + 1] - self.starts[request])
        return self.lengths[request] - torch.arange(count - 1, -1, -1)


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """Makes it for both backends."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMetadata:
        common = common_attn_metadata
        starts = common.query_start_loc.long()
        return SparseMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            starts=starts,
            lengths=common.seq_lens.long(),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            request_of=torch.repeat_interleave(torch.arange(common.num_reqs), starts.diff()),
        )


class SparseLatentBackend(AttentionBackend):
    """Latent attention over chosen positions."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA_SPARSE"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[SparseLatentImpl]:
        return SparseLatentImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder


class SparseLatentImpl(MLAAttentionImpl[SparseMetadata]):
    """One layer's."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *_: Any,
        kv_lora_rank: int,
        topk_indices_buffer: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.kv_lora_rank = kv_lora_rank
        self._indexer = others.get("indexer")
        self._buffer = topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """[tokens, top]; a drafter's indexer may be given another buffer after it was made."""
        buffer = self._buffer if self._indexer is None else self._indexer.topk_indices_buffer
        assert buffer is not None
        return buffer

    def record_logical_topk_ready(self) -> None:
        """What tells streams of a GPU that the buffer is written."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        slots = slot_mapping.flatten()
        latents = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)
        sparse.insert_latents(kv_cache, slots, latents[: slots.shape[0]])

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: SparseMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        # Rows beyond the requests' tokens are padding and stay zero.
        count = attn_metadata.request_of.shape[0]
        out = queries.new_zeros(queries.shape[0], queries.shape[1], self.kv_lora_rank)
        out[:count] = sparse.attend(
            queries[:count],
            kv_c_and_k_pe_cache,
            attn_metadata.block_table[attn_metadata.request_of],
            self.topk_indices_buffer[:count],
            self.scale,
            self.kv_lora_rank,
        ).to(out.dtype)
        return out, None


@SparseAttnIndexer.register_oot(name="SparseAttnIndexer")
class CpuSparseAttnIndexer(SparseAttnIndexer):
    """Made wherever the engine makes its indexer's operator."""

    def forward_native(
        self,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        if self.skip_k_cache_insert:  # DeepSeek-V4's, whose keys are inserted elsewhere.
            return super().forward_native(hidden_states, q_quant, k, weights)
        buffer = self.topk_indices_buffer
        of_layers = get_forward_context().attn_metadata
        if not isinstance(of_layers, dict):  # A run that only measures memory.
            return buffer
        step: SparseMetadata = of_layers[self.k_cache.prefix]
        cache = self.k_cache.kv_cache
        slots = step.slot_mapping
        sparse.insert_keys(cache, slots, k[: slots.shape[0]])
        buffer[: hidden_states.shape[0]] = sparse.NONE
        choose(step, cache, q_quant, weights, buffer, self.topk_tokens)
        return buffer

    forward_cpu = forward_native


def choose(
    step: SparseMetadata,
    cache: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    buffer: torch.Tensor,
    top: int,
) -> None:
    """Write the positions that each token of a step attends to into its row of `buffer`.

    Args:
        cache: [blocks, size, 132] uint8, with the keys of this step.
        queries: [tokens, heads, 128] float8.
        weights: [tokens, heads], with the scales of the queries and of the score itself.
        buffer: [tokens or more, top] int32.
    """
    for request, (start, end) in enumerate(
        zip(step.starts[:-1].tolist(), step.starts[1:].tolist(), strict=True)
    ):
        if start == end:
            continue
        keys = sparse.read_keys(cache, step.block_table[request], int(step.lengths[request]))
        scores = sparse.score(queries[start:end], weights[start:end], keys)
        buffer[start:end] = sparse.select(scores, step.seen(request), top)


class CpuIndexerBackend(indexer.DeepseekV32IndexerBackend):
    """What the engine takes its metadata and block sizes from; vLLM's are for kernels of GPUs."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder


def _for_queries(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function, but what the indexer asks of it without a Triton kernel per row."""

    @functools.wraps(original)
    def quantize(x: torch.Tensor, group_size: int, *rest: Any, **named: Any) -> Any:
        of_the_indexer = named == {"column_major_scales": False, "use_ue8m0": True} and not rest
        if of_the_indexer and x.shape[-1] == group_size:
            return sparse.quantize(x)
        return original(x, group_size, *rest, **named)

    return quantize


def install() -> None:
    """Have vLLM use backend and operator of the indexer; called any number of times.

    Models take both by name, so this comes before any model's module is imported.
    """
    if indexer.DeepseekV32IndexerBackend is CpuIndexerBackend:
        return
    indexer.DeepseekV32IndexerBackend = CpuIndexerBackend
    fp8_utils.per_token_group_quant_fp8 = _for_queries(fp8_utils.per_token_group_quant_fp8)
