"""The client keeps a fast server busy: what it costs in processor time, whatever else runs."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator

import pytest
from ready_scores import ANSWER, PROMPT, serve_scores

from mtppp.engine.bulk import BulkClient, Scores, for_each

REQUESTS = 150
FEWEST = 2000  # scored tokens for each second of one core


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server in a process of its own, so that only the client's time is counted."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_scores, args=(theirs,))
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    process.kill()
    process.join()


def test_scoring_costs_little(url: str) -> None:
    scored = 0

    def count(_: int, scores: Scores) -> None:
        nonlocal scored
        scored += len(scores.gap)

    async def score() -> float:
        async with BulkClient(url, role="baseline") as client:
            ids = list(range(PROMPT + ANSWER))
            began = time.process_time()
            await for_each(range(REQUESTS), lambda _: client.score("demo", ids, PROMPT), count, 16)
            return time.process_time() - began

    seconds = asyncio.run(score())
    assert scored == REQUESTS * ANSWER
    assert scored / seconds > FEWEST
