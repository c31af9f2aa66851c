"""Latent attention (MLA) on CPU hosts that verifies drafts rightly.

vLLM's CPU backend decodes one token per request. What verifies drafts has several tokens on top of
a context, so vLLM hands it to the prefill, and on CPUs that attends to the new tokens alone: with
MTP the text is wrong, with one stage as well as with several. Here such tokens are decoded, each as
a row of its own that sees the context and the tokens up to itself.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl


class DraftVerifyingBuilder(MLACommonMetadataBuilder):  # type: ignore[type-arg]
    """Counts requests of up to drafts + 1 tokens as decodes, however many each has."""

    query_len_support = QueryLenSupport.VARLEN


class DraftVerifyingImpl(CPUMLAImpl):
    """vLLM's, with a row for every token of a decode."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        requests = decode.seq_lens.shape[0]
        if queries.shape[0] == requests:
            return super().forward_mqa(queries, kv_c_and_k_pe_cache, attn_metadata, layer)
        starts = attn_metadata.query_start_loc[: requests + 1].to(torch.int64)
        lengths = starts.diff()
        rows = torch.repeat_interleave(torch.arange(requests), lengths)
        # Of a request's tokens the last sees seq_lens positions, the one before it one less.
        behind = starts[1:][rows] - 1 - torch.arange(rows.shape[0])
        seen = (decode.seq_lens[rows] - behind).to(torch.int32)
        out = queries.new_zeros(queries.shape[0], queries.shape[1], self.kv_lora_rank)
        # Rows beyond the requests' tokens are padding and stay zero.
        count = rows.shape[0]
        torch.ops._C.mla_decode_kvcache(
            out[:count],
            queries[:count].contiguous(),
            kv_c_and_k_pe_cache,
            self.scale,
            decode.block_table[rows].to(torch.int32),
            seen,
        )
        return out, None


class DraftVerifyingBackend(CPUMLABackend):
    """What the platform gives in place of CPUMLABackend."""

    @staticmethod
    def get_impl_cls() -> type[DraftVerifyingImpl]:
        return DraftVerifyingImpl

    @staticmethod
    def get_builder_cls() -> type[DraftVerifyingBuilder]:
        return DraftVerifyingBuilder
