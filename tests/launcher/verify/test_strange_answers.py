"""Whatever stands anywhere in an answer, it is either usable or refused with a reason."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from replay import Replay, recording

from mtppp.engine.bulk import BulkClient
from mtppp.errors import MtpppError

STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 1.5, math.inf, math.nan, 10**30, "x", "", [], {}, [[]], {"a": None}),
)
NO_ANSWERS = (b"[" * 100_000, b"\xff\xfe", b"", b"null", b"3", b'"x"', b'{"id": ' + b"9" * 5000)

MODEL = "demo-glm4-moe"
Call = Callable[[BulkClient], Awaitable[Any]]

PROMPT = recording().all[0]
WHOLE = [*PROMPT.ids, *PROMPT.tokens]
CALLS: dict[str, Call] = {
    "models": lambda client: client.models(),
    "version": lambda client: client.version(),
    "tokenize": lambda client: client.tokenize(MODEL, "Once"),
    "detokenize": lambda client: client.detokenize(MODEL, [5, 6]),
    "generate": lambda client: client.generate(MODEL, PROMPT.ids, 4),
    "likeliest": lambda client: client.likeliest(MODEL, WHOLE, len(WHOLE) - 2, 2),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all that an answer holds; of lists to the first and the last."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            yield from places(value[index], (*path, index))


def with_other(answer: Any, path: tuple[Any, ...], other: Any) -> Any:
    """The answer with something else at a place."""
    if not path:
        return other
    changed = copy.deepcopy(answer)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = other
    return changed


def is_usable(found: Any) -> bool:
    """Whether what a call returned is of the types that it promises, and finite."""
    if isinstance(found, float):
        return math.isfinite(found)
    if isinstance(found, int):
        return 0 <= found < 1 << 31
    if isinstance(found, dict):
        return all(map(is_usable, (*found.keys(), *found.values())))
    if hasattr(found, "__slots__"):
        return all(is_usable(getattr(found, name)) for name in found.__slots__)
    return found is None or isinstance(found, str) or all(map(is_usable, found))


@pytest.mark.parametrize("name", CALLS)
def test_answers_are_usable_or_refused(name: str, replays: list[Replay]) -> None:
    server = Replay()
    replays.append(server)
    call = CALLS[name]

    async def ask_all() -> list[str]:
        refused = []
        async with BulkClient(server.url, role="candidate") as client:
            assert is_usable(await call(client))
            answer = json.loads(server.answer(*server.asked[-1])[1])
            bodies = [*NO_ANSWERS]
            for number, path in enumerate(places(answer)):
                for other in STRANGE:
                    changed = with_other(answer, path, other)
                    if isinstance(changed, dict) and path != ("id",):
                        changed["id"] = f"{number}-{len(bodies)}"
                    bodies.append(json.dumps(changed).encode())
            for body in bodies:
                server.misbehave = lambda _, __, body=body: (200, body)
                try:
                    assert is_usable(await call(client)), body[:300]
                except MtpppError as error:
                    refused.append(error.message)
        return refused

    refused = asyncio.run(ask_all())
    assert all("the candidate at http" in message for message in refused)
    # What is only told to people may be missing.
    assert len(refused) > 10 or name in ("version", "detokenize")


@pytest.mark.parametrize("asked", [7, 9])
def test_of_tokens_that_tie_the_same_one_is_the_best(asked: int, replays: list[Replay]) -> None:
    """Were it the one that was asked about, tokens at temperature 1 would be the best too often."""
    replays.append(Replay())
    # As vLLM has them: the one that was asked about first, then the likeliest by rank.
    ranked = {9: (-0.7, 1), 7: (-0.7, 2), 11: (-4.0, 3)}
    position = {
        str(token): {"logprob": ranked[token][0], "rank": ranked[token][1]}
        for token in dict.fromkeys((asked, *ranked))
    }
    choice = {"token_ids": [0], "finish_reason": "length", "prompt_logprobs": [None, position]}
    body = json.dumps({"id": "1", "choices": [choice]}).encode()
    replays[0].misbehave = lambda *_: (200, body)

    async def ask() -> Any:
        async with BulkClient(replays[0].url, role="baseline") as client:
            return await client.likeliest(MODEL, [3, asked], 1, 3)

    scores, _ = asyncio.run(ask())
    assert (list(scores.best), list(scores.gap)) == ([7], [0.0])
    assert list(scores.rank) == [ranked[asked][1]]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "x", ""])
def test_counters_that_are_none_are_not_known(value: str, replays: list[Replay]) -> None:
    replays.append(Replay())
    replays[0].metrics = f'vllm:spec_decode_num_drafts_total{{engine="0"}} {value}\n'

    async def ask() -> Any:
        async with BulkClient(replays[0].url, role="candidate") as client:
            return await client.acceptance()

    found = asyncio.run(ask())
    assert found is None or found.drafts == 0
