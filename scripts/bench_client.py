#!/usr/bin/env python3
"""Whether `mtppp verify` keeps a server as busy as `vllm bench serve` does, and how fast it scores.

    scripts/bench_client.py > record.json         both, five pairs; about ten minutes
    scripts/bench_client.py --only scores         what needs no vLLM; seconds

Answers: one vLLM on CPUs is asked by the one and by the other in turn, each first in every other
pair. Both send as many prompts of as many random tokens, as many at a time, and want as many tokens
of each, ends of answers ignored, greedily. The server caches no prefixes: prompts of `vllm bench`
come again. Both clocks run from the first request to the last answer; `vllm bench serve` streams
answers, `mtppp verify` has no use for that. Both are run once before they are measured.

Scores: a server that does nothing but send scores that it has ready is asked to score. It and the
client have a core each, if there are two and nothing else runs.

Prints a JSON record. Exit status 1 when the median ratio of tokens per second is below 0.9, or the
median of scored tokens per second below 2,000.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / part) for part in ("launcher", "patches", "scripts", "tests/launcher/verify")
]

from ready_scores import ANSWER, PROMPT, serve_scores  # noqa: E402

from mtppp.engine.bulk import Answer, BulkClient, Scores, for_each  # noqa: E402
from verify_matrix import MODELS, Arm, serving  # noqa: E402

ARM = Arm(more=("--no-enable-prefix-caching",))
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
VOCABULARY = json.loads((MODELS / ARM.model / "config.json").read_text())["vocab_size"]
PORT = 8300
LEAST_RATIO = 0.9
FEWEST_SCORED = 2000  # tokens per second
DIFFERENT_PROMPTS = 0.02
"""By which lengths of prompts may differ: `vllm bench` sends texts, which do not always become
the number of tokens that was asked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", choices=["answers", "scores"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": " ".join(["scripts/bench_client.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load_before": [round(load, 1) for load in os.getloadavg()],
    }
    right = True
    if arguments.only != "scores":
        record["answers"] = answers(arguments)
        right &= record["answers"]["ratio_median"] >= LEAST_RATIO
    if arguments.only != "answers":
        record["scores"] = scores(arguments.pairs)
        right &= record["scores"]["per_second_median"] >= FEWEST_SCORED
    print(json.dumps(record, indent=1))
    return 0 if right else 1


def answers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Output tokens in a second of both clients, and what part of the other's ours has."""
    pairs: list[dict[str, float]] = []
    bench = Bench(arguments.requests, arguments.concurrency)
    with serving(ARM, PORT) as url:
        arms = [bench.by_client, bench.by_vllm]
        for arm in arms:
            arm(url, seed=0)
        for number in range(1, arguments.pairs + 1):
            order = arms if number % 2 else arms[::-1]
            pairs.append({arm.__name__: round(arm(url, seed=number), 1) for arm in order})
            print(json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    ratios = [pair["by_client"] / pair["by_vllm"] for pair in pairs]
    return {
        "tokens_per_second": pairs,
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "tokens": {"prompt": PROMPT_TOKENS, "answer": OUTPUT_TOKENS},
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


class NeverEnding(BulkClient):
    """Asks as `mtppp verify` does, and wants all tokens, as `vllm bench serve` does."""

    async def _completion(self, model: str, ids: Sequence[int], **asked: Any) -> dict[str, Any]:
        return await super()._completion(model, ids, ignore_eos=True, **asked)


class Bench:
    """Both clients, with the same work."""

    def __init__(self, requests: int, concurrency: int) -> None:
        self._requests = requests
        self._concurrency = concurrency
        made = subprocess.run(
            [ROOT / "scripts/environment", ARM.release],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self._python = made.stdout.strip()

    def by_client(self, url: str, seed: int) -> float:
        """Output tokens in a second, asked as `mtppp verify` asks."""
        draw = random.Random(seed)
        prompts = [
            tuple(draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS))
            for _ in range(self._requests)
        ]
        tokens = 0

        def count(_: Sequence[int], answer: Answer) -> None:
            nonlocal tokens
            tokens += len(answer.tokens)

        async def ask() -> float:
            async with NeverEnding(url, role="candidate", concurrency=self._concurrency) as client:
                began = time.monotonic()
                await for_each(
                    prompts,
                    lambda ids: client.generate(ARM.model, ids, OUTPUT_TOKENS),
                    count,
                    client.concurrency,
                )
                return time.monotonic() - began

        seconds = asyncio.run(ask())
        self._same("mtppp", "tokens of answers", tokens, OUTPUT_TOKENS)
        return tokens / seconds

    def by_vllm(self, url: str, seed: int) -> float:
        """The same by `vllm bench serve`, as it says itself."""
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run(
                [
                    *(self._python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
                    *("--backend", "openai", "--base-url", url, "--model", ARM.model),
                    *("--tokenizer", MODELS / ARM.model, "--dataset-name", "random"),
                    *("--random-input-len", str(PROMPT_TOKENS), "--random-range-ratio", "0"),
                    *("--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos"),
                    *("--num-prompts", str(self._requests), "--seed", str(seed)),
                    *("--max-concurrency", str(self._concurrency), "--temperature", "0"),
                    *("--disable-tqdm", "--save-result", "--result-dir", directory),
                    *("--result-filename", "result.json"),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1"},
                check=False,
            )
            if done.returncode:
                sys.exit(f"vllm bench serve ended with {done.returncode}:\n{done.stdout[-3000:]}")
            result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
        self._same("vllm bench", "answers", result["completed"], 1)
        self._same("vllm bench", "tokens of answers", result["total_output_tokens"], OUTPUT_TOKENS)
        prompts = result["total_input_tokens"] / (self._requests * PROMPT_TOKENS)
        if abs(prompts - 1) > DIFFERENT_PROMPTS:
            sys.exit(f"vllm bench sent {prompts:.2f} of the tokens of prompts: no comparison")
        return float(result["output_throughput"])

    def _same(self, who: str, what: str, found: int, each: int) -> None:
        if found != self._requests * each:
            sys.exit(f"{who} got {found} {what} in place of {self._requests * each}: no comparison")


def scores(runs: int) -> dict[str, Any]:
    """Tokens scored in a second, over so many runs."""
    found = [scored_per_second() for _ in range(runs)]
    return {
        "per_second": [round(one) for one in found],
        "per_second_median": round(statistics.median(found)),
        "tokens": {"prompt": PROMPT, "answer": ANSWER},
    }


def scored_per_second(requests: int = 300) -> float:
    """Tokens scored in a second by a server that only sends what it has ready."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_scores, args=(theirs,))
    process.start()
    theirs.close()  # a server that dies is noticed
    scored = 0

    def count(_: int, scores: Scores) -> None:
        nonlocal scored
        scored += len(scores.gap)

    async def score(port: int) -> float:
        async with BulkClient(f"http://127.0.0.1:{port}", role="baseline") as client:
            ids = list(range(PROMPT + ANSWER))
            began = time.monotonic()
            await for_each(
                range(requests), lambda _: client.score("m", ids, PROMPT), count, client.concurrency
            )
            return time.monotonic() - began

    try:
        seconds = asyncio.run(score(ours.recv()))
    finally:
        process.kill()
        process.join()
    return scored / seconds


if __name__ == "__main__":
    sys.exit(main())
