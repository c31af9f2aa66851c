"""The relay on vLLM's own handler and runner, stream by stream: what engines on CPUs cannot show.

On a GPU what the stages tell each other goes over a stream beside the main one. Two things can then
be wrong without an error: one stream uses what the other has not finished, or memory that the other
still uses is given away. And a slot may belong to another request by the time it is told.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("relay_world.py")
SIDE = "side stream of stage 1"
NONE, KNOWN = [0, 0, 0], [99, 99, 99]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def drafts(step: int, slot: int) -> list[int]:
    return [-(100 * step + 10 * slot + i) for i in range(3)]


@pytest.mark.parametrize("release", ["0.27.1", "0.29.0"])
def test_the_relay_in_the_order_of_its_streams(
    vllm_python: Callable[[str], Path], release: str
) -> None:
    done = subprocess.run(
        [vllm_python(release), WORLD], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])

    # Streams wait for each other, and allocators know of each use beside their own stream.
    assert seen["problems"] == []

    # Every stage that samples sends three messages beside its main stream; of drafts + 1 tokens
    # where it sampled one, too.
    assert [len(messages) for messages in seen["sent"]] == [3, 0, 3, 3, 3, 3, 0]
    assert {stream for messages in seen["sent"] for stream, _ in messages} == {SIDE}
    tokens = [messages[0][1] for messages in seen["sent"] if messages]
    assert tokens[0] == [[100, 0, 0, 0], [110, 0, 0, 0]]
    assert {len(row) for rows in tokens for row in rows} == {4}

    # The first stage has drafts two steps later: those of requests that are still there. Slot 1 is
    # another's from the fifth step on, slot 0 from the sixth; slot 3 has not sampled.
    assert seen["tables"] == [
        [NONE, NONE, NONE, NONE],
        [NONE, NONE, NONE, NONE],
        [drafts(1, 0), drafts(1, 1), NONE, NONE],
        [drafts(1, 0), drafts(1, 1), NONE, NONE],
        [drafts(3, 0), KNOWN, NONE, NONE],
        [KNOWN, KNOWN, drafts(4, 2), NONE],
        [KNOWN, KNOWN, drafts(4, 2), NONE],
    ]
    # vLLM leaves the same rows out of the counts and tokens that it applies.
    assert [rows for rows, *_ in seen["applied"]] == [[0, 1], [0, -1], [2, -1]]
