"""What one layer keeps per token or per request, by the layout vLLM stores it in.

Sizes are bytes per GPU. A latent (MLA) cache is whole on every tensor-parallel rank; key/value
heads are spread over the ranks, and repeated where there are more ranks than heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtppp.errors import ConfigurationError

_FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"})
_WIDE = {"bfloat16": 2, "float16": 2, "float32": 4}

INDEXER_QUANTISATION_BLOCK = 128
"""The indexer keeps its keys in FP8 with one float32 scale per 128, whatever the cache type."""


def element_bytes(cache_type: str, activation: int) -> int:
    """Bytes per number of `--kv-cache-dtype`.

    Args:
        activation: bytes of the model's own type, which "auto" means.

    Raises:
        ConfigurationError: mtppp does not know the layout of that type.
    """
    if cache_type == "auto":
        return activation
    if cache_type in _FP8:
        return 1
    if cache_type in _WIDE:
        return _WIDE[cache_type]
    raise ConfigurationError(
        f"mtppp does not know how much a KV cache of type {cache_type!r} takes",
        hint=f"known: auto, {', '.join(sorted(_FP8 | set(_WIDE)))}",
    )


@dataclass(frozen=True)
class LatentCache:
    """MLA: one latent vector per token.

    Attributes:
        rank: `kv_lora_rank`.
        rope: `qk_rope_head_dim`.
        sparse: the layer attends to the tokens an indexer picked (DSA); an FP8 cache then has
            the packed layout `fp8_ds_mla`: the latent in FP8, one float32 scale per 128 of it,
            and the rotary part in bfloat16 (656 bytes for 512 + 64).
        indexer: width of the indexer's keys; None when this layer has no indexer of its own.
    """

    rank: int
    rope: int
    sparse: bool = False
    indexer: int | None = None

    def per_token(self, cache_type: str, activation: int, tensor: int) -> int:
        size = element_bytes(cache_type, activation)
        if size == 1 and self.sparse:
            latent = self.rank + self.rank // 128 * 4 + self.rope * 2
        else:
            latent = (self.rank + self.rope) * size
        if self.indexer is None:
            return latent
        return latent + self.indexer + self.indexer // INDEXER_QUANTISATION_BLOCK * 4

    def per_request(self, cache_type: str, activation: int, tensor: int, drafts: int) -> int:
        return 0


@dataclass(frozen=True)
class HeadCache:
    """Keys and values per head.

    Attributes:
        window: tokens a sliding-window layer keeps; None for full attention.
    """

    heads: int
    key: int
    value: int
    window: int | None = None

    def _bytes(self, cache_type: str, activation: int, tensor: int) -> int:
        heads = -(-self.heads // tensor)
        return heads * (self.key + self.value) * element_bytes(cache_type, activation)

    def per_token(self, cache_type: str, activation: int, tensor: int) -> int:
        return 0 if self.window else self._bytes(cache_type, activation, tensor)

    def per_request(self, cache_type: str, activation: int, tensor: int, drafts: int) -> int:
        """Bytes a request takes however long it is: the window, and the drafts beyond it."""
        if not self.window:
            return 0
        return (self.window + drafts) * self._bytes(cache_type, activation, tensor)


@dataclass(frozen=True)
class StateCache:
    """Linear attention (gated delta net): a state of fixed size per request.

    Attributes:
        state: bytes per number of the recurrent state.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    kernel: int
    state: int

    def per_token(self, cache_type: str, activation: int, tensor: int) -> int:
        return 0

    def per_request(self, cache_type: str, activation: int, tensor: int, drafts: int) -> int:
        """Bytes a request takes: one state, and one more per draft token to roll back to."""
        channels = 2 * self.key_heads * self.key + self.value_heads * self.value
        convolution = -(-channels // tensor) * (self.kernel - 1 + drafts) * activation
        recurrent = -(-self.value_heads // tensor) * self.key * self.value * self.state
        return (1 + drafts) * (convolution + recurrent)


Cache = LatentCache | HeadCache | StateCache
