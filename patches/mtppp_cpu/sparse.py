"""What sparse latent attention (DeepSeek-V3.2, GLM-5.2) computes over paged caches, in plain torch.

An indexer scores every position that a token may see, and the best of them are all that the token
attends to. A reference: it says what is computed, not how fast it could be. With the kernels of
GPUs it shares what decides which tokens come out, and what goes wrong when layers are cut apart:

- A block of the index cache holds `size` keys of 128 numbers in float8, then their `size` scales in
  float32, powers of two: 132 bytes a token. Queries are quantized likewise.
- Of the scores no more than the `top` best are kept. A token that sees fewer positions takes all of
  them, and its row ends in -1.
- A position is looked up in the block table of the token's request, and only a negative one, or one
  beyond the table's width, is left out. How long the request is does not matter: a row of positions
  that was made for another request reads what lies there.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEX_DIM = 128
"""Numbers per key of the index cache."""
INDEX_BYTES = INDEX_DIM + 4
NONE = -1
"""Fills what a row of positions has too many places for."""

_FLOAT8 = torch.float8_e4m3fn
_ROWS_AT_ONCE = 256


def quantize(values: Tensor, floor: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Float8 with one scale for all numbers of the last dimension.

    Args:
        floor: the least maximum that is scaled to.

    Returns:
        [..., n] float8 and [..., 1] float32.
    """
    values = values.float()
    largest = torch.finfo(_FLOAT8).max
    maximum = values.abs().amax(dim=-1, keepdim=True).clamp(min=floor)
    scale = torch.exp2(torch.ceil(torch.log2(maximum / largest)))
    return (values / scale).clamp(-largest, largest).to(_FLOAT8), scale


def insert_keys(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """Put keys into the index cache.

    Args:
        cache: [blocks, size, 132] uint8, changed in place.
        slots: [tokens], block * size + place within the block; negative: the token has none.
        keys: [tokens, 128].
    """
    bytes_of_keys, scales = _pages(cache)
    block, place, kept = _places(slots, cache.shape[1])
    quantized, scale = quantize(keys[kept], floor=1e-4)
    bytes_of_keys[block, place] = quantized.view(torch.uint8)
    scales[block, place] = scale[:, 0]


def read_keys(cache: Tensor, table: Tensor, count: int) -> Tensor:
    """The first `count` keys of one request, [count, 128] float32.

    Args:
        cache: [blocks, size, 132] uint8.
        table: [columns], the request's blocks.
    """
    bytes_of_keys, scales = _pages(cache)
    position = torch.arange(count)
    block, place = table[position // cache.shape[1]].long(), position % cache.shape[1]
    keys = bytes_of_keys[block, place].view(_FLOAT8).float()
    return keys * scales[block, place, None]


def score(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """How much each token wants each position, [tokens, positions] float32.

    Args:
        queries: [tokens, heads, 128], as quantized, without their scales.
        weights: [tokens, heads], with the scales of the queries and of the score itself.
        keys: [positions, 128].
    """
    by_head = torch.einsum("thd,pd->thp", queries.float(), keys).relu()
    return torch.einsum("thp,th->tp", by_head, weights.float())


def select(scores: Tensor, seen: Tensor, top: int) -> Tensor:
    """The positions with the best scores, [tokens, top] int32, the best first, then -1.

    Of equal scores the earlier position counts as better.

    Args:
        scores: [tokens, positions].
        seen: [tokens], how many positions each token sees, its own included.
    """
    future = torch.arange(scores.shape[1]) >= seen[:, None]
    masked = scores.masked_fill(future, float("-inf"))
    best = masked.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    best = best.masked_fill(future.gather(1, best), NONE)
    rows = torch.full((scores.shape[0], top), NONE, dtype=torch.int32)
    rows[:, : best.shape[1]] = best.to(torch.int32)
    return rows


def insert_latents(cache: Tensor, slots: Tensor, latents: Tensor) -> None:
    """Put latent keys with their rotary part into the cache of a layer.

    Args:
        cache: [blocks, size, 576], changed in place.
        slots: as for `insert_keys`.
        latents: [tokens, 576].
    """
    block, place, kept = _places(slots, cache.shape[1])
    cache[block, place] = latents[kept].to(cache.dtype)


def attend(
    queries: Tensor, cache: Tensor, tables: Tensor, positions: Tensor, scale: float, latent: int
) -> Tensor:
    """Each token's attention over the positions of its row, [tokens, heads, latent] float32.

    A row without any position gives zeros.

    Args:
        queries: [tokens, heads, 576].
        cache: [blocks, size, 576].
        tables: [tokens, columns], the blocks of each token's request.
        positions: [tokens, top].
        scale: of the scores.
        latent: how many of the 576 numbers are values.
    """
    parts = [
        _attend(queries[rows].float(), cache, tables[rows], positions[rows].long(), scale, latent)
        for rows in torch.arange(queries.shape[0]).split(_ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def _attend(
    queries: Tensor, cache: Tensor, tables: Tensor, positions: Tensor, scale: float, latent: int
) -> Tensor:
    size = cache.shape[1]
    there = (positions >= 0) & (positions < tables.shape[1] * size)
    positions = positions.masked_fill(~there, 0)
    blocks = tables.long().gather(1, positions // size)
    # What is not there may be anything, NaN too.
    found = cache[blocks, positions % size].float().masked_fill(~there[..., None], 0)
    scores = torch.einsum("thd,tpd->thp", queries, found) * scale
    weights = scores.masked_fill(~there[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("thp,tpd->thd", weights.nan_to_num(0), found[..., :latent])


def _pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an index cache: keys [blocks, size, 128] uint8, scales [blocks, size] float32."""
    size = cache.shape[1]
    pages = cache.flatten(1)
    keys = pages[:, : size * INDEX_DIM].unflatten(1, (size, INDEX_DIM))
    return keys, pages[:, size * INDEX_DIM :].view(torch.float32)


def _places(slots: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and places of those slots that are some, and which they are, [tokens] bool."""
    kept = slots >= 0
    chosen = slots[kept].long()
    return chosen // size, chosen % size, kept
