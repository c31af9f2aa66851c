"""Sparse attention over paged caches against one without pages, in an environment with torch.

    PYTHON_OF_A_RELEASE sparse_world.py

Requests of unequal length grow in steps as an engine has them: prompts in parts, single tokens,
drafts to verify, several requests in each. The caches begin as NaN, so that nothing unwritten is
read unnoticed. Prints a JSON object per number of positions chosen.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

from mtppp_cpu import sparse

SIZE = 16
BLOCKS = 40
HEADS = 4
INDEX_HEADS = 3
SCALE = 0.1
LATENT = 512
# Tokens of each request in each step; a request not named has none.
STEPS = (
    {"a": 37, "b": 3},
    {"b": 1, "c": 64},
    {"a": 20, "c": 30, "b": 4},
    {"b": 4, "c": 1, "a": 1},
    {"a": 1, "b": 4, "c": 4},
)


@dataclass
class Request:
    """One request: what its tokens brought, without pages, and its blocks."""

    blocks: list[int]
    latents: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)


def main() -> None:
    for top in (16, 200):
        torch.manual_seed(top)
        print(json.dumps({"top": top, **compare(top)}), flush=True)


def compare(top: int) -> dict[str, float | int]:
    """Run all steps; how far off the outputs are, and how many rows choose otherwise."""
    free = list(range(BLOCKS))
    random.Random(1).shuffle(free)
    requests = {name: Request([free.pop() for _ in range(8)]) for name in "abc"}
    latent_cache = torch.full((BLOCKS, SIZE, 576), torch.nan)
    # As in an engine, the pages of a layer may lie among those of others.
    memory = torch.full((BLOCKS, 2, SIZE, sparse.INDEX_BYTES), 255, dtype=torch.uint8)
    index_cache = memory[:, 1]
    error = 0.0
    rows = other_rows = short_rows = 0
    for step in STEPS:
        for name, count in step.items():
            request = requests[name]
            before = len(request.keys)
            latents, keys = torch.randn(count, 576), torch.randn(count, sparse.INDEX_DIM)
            request.latents += latents
            request.keys += keys
            table = torch.tensor(request.blocks, dtype=torch.int32)
            slots = torch.tensor(
                [request.blocks[p // SIZE] * SIZE + p % SIZE for p in range(before, before + count)]
            )
            # A row of padding goes nowhere.
            padded = torch.cat((slots, torch.tensor([-1])))
            sparse.insert_latents(latent_cache, padded, torch.cat((latents, latents[:1])))
            sparse.insert_keys(index_cache, padded, torch.cat((keys, keys[:1])))

            wanted, weights = torch.randn(count, INDEX_HEADS, 128), torch.randn(count, INDEX_HEADS)
            quantized, scales = sparse.quantize(wanted)
            seen = torch.arange(before, before + count) + 1
            found = sparse.read_keys(index_cache, table, before + count)
            scores = sparse.score(quantized, weights * scales[..., 0], found)
            chosen = sparse.select(scores, seen, top)
            queries = torch.randn(count, HEADS, 576)
            tables = table.expand(count, -1)
            out = sparse.attend(queries, latent_cache, tables, chosen, SCALE, LATENT)

            for row in range(count):
                expected = best_of(request, wanted[row], weights[row], before + row + 1, top)
                positions = chosen[row][chosen[row] >= 0].tolist()
                rows += 1
                short_rows += len(positions) < top
                other_rows += sorted(positions) != sorted(expected)
                dense = attention(request, queries[row], expected)
                error = max(error, float((out[row] - dense).abs().max()))
    nothing = sparse.attend(
        torch.randn(1, HEADS, 576), latent_cache, tables[:1], torch.tensor([[-1, -1]]), 1, LATENT
    )
    return {
        "rows": rows,
        "short_rows": short_rows,
        "other_rows": other_rows,
        "error": error,
        "nothing": float(nothing.abs().max()),
    }


def best_of(
    request: Request, wanted: torch.Tensor, weights: torch.Tensor, seen: int, top: int
) -> list[int]:
    """The positions with the best scores, one by one, from what the tokens brought."""
    scores = []
    for position in range(seen):
        key = rounded(request.keys[position])
        by_head = [float(torch.dot(rounded(head), key).clamp(min=0)) for head in wanted]
        scores.append(sum(s * float(w) for s, w in zip(by_head, weights, strict=True)))
    return sorted(range(seen), key=lambda position: -scores[position])[:top]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To float8 with a power of two as scale, and back."""
    scale = 2.0 ** torch.ceil(torch.log2(values.abs().max() / 448))
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def attention(request: Request, queries: torch.Tensor, positions: list[int]) -> torch.Tensor:
    latents = torch.stack([request.latents[position] for position in positions])
    weights = (queries @ latents.T * SCALE).softmax(dim=-1)
    return weights @ latents[:, :LATENT]


if __name__ == "__main__":
    main()
