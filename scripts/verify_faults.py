"""Faults, as a proxy before a server would make them; for scripts/verify_power.py and tests.

Each takes what was recorded of a prompt, the tokens of its answer and a source of chance, and
returns the tokens that a client gets instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Change = Callable[[Any, list[int], random.Random], Sequence[int]]

REJECTED = 0.3
"""Share of tokens that come after a rejected draft."""


PAST_200 = 0.254
"""Share of the recorded tokens that are past position 200."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: in words.
        change: what becomes of greedy answers.
        tokens, requests: share of tokens damaged, or of requests ruined, for the power calculation;
            0 where it has no say.
        sampled: `change` befalls answers at temperature above 0 alone.
        shifted: the baseline's log probabilities are those of the next position.
        calls_finished: answers that `change` makes shorter are said to have ended of themselves.
    """

    what: str
    change: Change | None = None
    tokens: float = 0.0
    requests: float = 0.0
    sampled: bool = False
    shifted: bool = False
    calls_finished: bool = False


def second_best(rate: float) -> Change:
    def change(recorded: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        return [
            other if chance.random() < rate else token
            for token, other in zip(tokens, recorded.other, strict=True)
        ]

    return change


def replaced(rate: float, vocabulary: int) -> Change:
    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        return [chance.randrange(vocabulary) if chance.random() < rate else t for t in tokens]

    return change


def after_rejection(rate: float, vocabulary: int) -> Change:
    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        return [
            chance.randrange(vocabulary)
            if chance.random() < REJECTED and chance.random() < rate
            else token
            for token in tokens
        ]

    return change


def past(position: int, rate: float, vocabulary: int) -> Change:
    """Only where prompt and answer together are longer than that."""

    def change(recorded: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        start = len(recorded.ids)
        return [
            chance.randrange(vocabulary)
            if start + i >= position and chance.random() < rate
            else token
            for i, token in enumerate(tokens)
        ]

    return change


def duplicated(rate: float) -> Change:
    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        result: list[int] = []
        for token in tokens:
            result += [token, token] if chance.random() < rate else [token]
        return result[: len(tokens)]

    return change


def swapped(rate: float) -> Change:
    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        result = list(tokens)
        for i in range(len(result) - 1):
            if chance.random() < rate:
                result[i], result[i + 1] = result[i + 1], result[i]
        return result

    return change


def ruined(rate: float, others: Sequence[Sequence[int]]) -> Change:
    """The rest of another answer, as when requests are mixed up."""

    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        if chance.random() >= rate or len(tokens) < 8:
            return tokens
        other = others[chance.randrange(len(others))]
        return [*tokens[:2], *other[2 : len(tokens)], *tokens[max(2, len(other)) :]]

    return change


def cut(rate: float) -> Change:
    """The second half is missing."""

    def change(_: Any, tokens: list[int], chance: random.Random) -> Sequence[int]:
        return tokens[: len(tokens) // 2] if chance.random() < rate else tokens

    return change


def faults(vocabulary: int, others: Sequence[Sequence[int]]) -> dict[str, Fault]:
    """All of them, by name."""
    return {
        "none": Fault("nothing"),
        "second-0.001": Fault("1 token in 1,000 the second best", second_best(0.001), 0.001),
        "second-0.01": Fault("1 token in 100 the second best", second_best(0.01), 0.01),
        "random-0.001": Fault("1 token in 1,000 random", replaced(0.001, vocabulary), 0.001),
        "random-0.01": Fault("1 token in 100 random", replaced(0.01, vocabulary), 0.01),
        "rejected": Fault(
            "1 in 20 after a rejected draft random", after_rejection(0.05, vocabulary), 0.015
        ),
        "past-200": Fault(
            "1 in 20 past position 200 random", past(200, 0.05, vocabulary), 0.05 * PAST_200
        ),
        "duplicated": Fault("1 token in 100 twice", duplicated(0.01), 0.01),
        "swapped": Fault("1 token in 100 swapped with the next", swapped(0.01), 0.01),
        "ruined": Fault("1 request in 200 ruined", ruined(0.005, others), 0.0, 0.005),
        "ruined-0.05": Fault("1 request in 20 ruined", ruined(0.05, others), 0.0, 0.05),
        "cut": Fault(
            "1 request in 20 cut in half and called finished",
            cut(0.05),
            requests=0.05,
            calls_finished=True,
        ),
        "sampled": Fault(
            "1 token in 20 random, only at temperature > 0",
            replaced(0.05, vocabulary),
            sampled=True,
        ),
        "shifted": Fault("the baseline's log probabilities shifted by one", shifted=True),
    }
