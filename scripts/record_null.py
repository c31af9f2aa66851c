#!/usr/bin/env python3
"""Record what a real server answers and how it scores that, for tests and simulations.

    scripts/record_null.py http://127.0.0.1:8000 tests/data/verify-null.jsonl.gz

Writes a line for each prompt of mtppp's smoke tier: its ids, the greedy answer, and for each
emitted token the gap, rank and log probability, with the best other token and its gap. The last
line has what the server says of damaged tokens (swapped, doubled, dropped) and of random ones.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "launcher"), str(ROOT / "patches")]

from mtppp.engine.bulk import BulkClient, for_each  # noqa: E402
from mtppp.verify.control import damage  # noqa: E402
from mtppp.verify.prompts import own_set  # noqa: E402
from mtppp.verify.tiers import TIERS  # noqa: E402

DAMAGED = 600
RANDOM = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=int, default=TIERS["smoke"].requests)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    lines = asyncio.run(record(arguments.url, arguments.prompts, arguments.concurrency))
    with gzip.GzipFile(arguments.output, "wb", mtime=0) as file:
        file.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


async def record(url: str, count: int, concurrency: int) -> list[dict[str, Any]]:
    """All lines of the file."""
    tier = TIERS["smoke"]
    lines: dict[str, dict[str, Any]] = {}
    async with BulkClient(url, role="baseline", timeout=3000, concurrency=concurrency) as client:
        [card] = await client.models()
        room = card.context - tier.tokens - 2

        async def null(prompt: Any) -> dict[str, Any]:
            ids = await client.tokenize(card.name, prompt.text or prompt.messages)
            assert ids is not None
            ids = ids[: min(prompt.length or room, room)]
            answer = await client.generate(card.name, ids, tier.tokens)
            scored = await scores(client, card.name, ids, answer.tokens)
            return {
                "key": prompt.key,
                "ids": ids,
                "tokens": answer.tokens,
                "finish": answer.finish,
                **scored,
            }

        def keep(prompt: Any, line: dict[str, Any]) -> None:
            lines[prompt.key] = line
            print(f"{len(lines)} of {count}", file=sys.stderr)

        prompts = own_set(count)
        await for_each(prompts, null, keep, concurrency)
        ordered = [lines[prompt.key] for prompt in prompts]
        damaged: dict[str, list[Any]] = {"damaged": [], "random": []}

        async def rescore(job: tuple[str, str, tuple[int, ...], int]) -> tuple[str, list[Any]]:
            what, key, tokens, position = job
            scored = await scores(client, card.name, lines[key]["ids"], tokens)
            end = position + 2
            return what, [scored[name][position:end] for name in ("gap", "rank", "logprob")]

        jobs = [
            ("damaged", d.key, d.tokens, d.position)
            for d in damage({k: line["tokens"] for k, line in lines.items()}, DAMAGED, 9).values()
        ]
        draw = random.Random(9)
        vocabulary = 1 + max(max(line["ids"]) for line in ordered)
        for _ in range(RANDOM):
            line = draw.choice([line for line in ordered if len(line["tokens"]) > 2])
            position = draw.randrange(len(line["tokens"]) - 1)
            tokens = list(line["tokens"])
            tokens[position] = draw.randrange(vocabulary)
            jobs.append(("random", line["key"], tuple(tokens), position))
        await for_each(
            jobs, rescore, lambda _, result: damaged[result[0]].append(result[1]), concurrency
        )
        head = {
            "model": card.name,
            "release": await client.version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "context": card.context,
            "vocabulary": vocabulary,
        }
    return [head, *ordered, damaged]


async def scores(client: Any, model: str, ids: Any, tokens: Any) -> dict[str, Any]:
    """Of each token, and the best other one."""
    if not tokens:
        return {name: [] for name in ("gap", "rank", "logprob", "other", "other_gap")}
    body = await client._completion(
        model, [*ids, *tokens], max_tokens=1, temperature=0.0, prompt_logprobs=2
    )
    result: dict[str, list[Any]] = {
        name: [] for name in ("gap", "rank", "logprob", "other", "other_gap")
    }
    positions = body["choices"][0]["prompt_logprobs"][len(ids) :]
    for token, position in zip(tokens, positions, strict=True):
        best = max(entry["logprob"] for entry in position.values())
        entry = position[str(token)]
        other = max(
            (name for name in position if name != str(token)),
            key=lambda name: position[name]["logprob"],
        )
        result["gap"].append(round(best - entry["logprob"], 4))
        result["rank"].append(entry["rank"])
        result["logprob"].append(round(entry["logprob"], 4))
        result["other"].append(int(other))
        result["other_gap"].append(round(best - position[other]["logprob"], 4))
    return result


if __name__ == "__main__":
    main()
