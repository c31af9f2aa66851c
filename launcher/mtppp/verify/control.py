"""The positive control: answers of the baseline, damaged on purpose, that must be noticed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEWEST = 50
MOST = 150
KINDS = ("swap", "duplicate", "drop")
RUINED_REQUESTS = 20

_INTACT = 2  # tokens of a ruined answer that are still its own


@dataclass(frozen=True, slots=True)
class Damaged:
    """An answer with one damage.

    Attributes:
        key: of the prompt.
        position: of the first token that is not where it belongs.
    """

    key: str
    kind: str
    tokens: tuple[int, ...]
    position: int


def damage(answers: Mapping[str, Sequence[int]], count: int, seed: int) -> dict[str, Damaged]:
    """Damage one token each in `count` places, drawn among all; fewer where that cannot be.

    Returns:
        damaged answers by a name of their own.
    """
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    places = [(key, i) for key, tokens in answers.items() for i in range(len(tokens) - 1)]
    draw.shuffle(places)
    found: dict[str, Damaged] = {}
    for key, position in places:
        kind = KINDS[len(found) % len(KINDS)]
        damaged = _damaged(key, kind, tuple(answers[key]), position)
        if damaged is not None:
            found[f"{key}/{kind}/{position}"] = damaged
        if len(found) == count:
            break
    return found


def _damaged(key: str, kind: str, tokens: tuple[int, ...], position: int) -> Damaged | None:
    """None where nothing would be changed."""
    here, after = tokens[position], tokens[position + 1]
    if here == after:
        return None
    before, rest = tokens[:position], tokens[position + 2 :]
    if kind == "swap":
        return Damaged(key, kind, (*before, after, here, *rest), position)
    if kind == "duplicate":
        return Damaged(key, kind, (*before, here, here, after, *rest), position + 1)
    return Damaged(key, kind, (*before, after, *rest), position)


def ruin(answers: Mapping[str, Sequence[int]], count: int) -> dict[str, Damaged]:
    """Give `count` answers the rest of another's, as when requests are mixed up."""
    long = [(key, tuple(tokens)) for key, tokens in answers.items() if len(tokens) >= 8]
    ruined: dict[str, Damaged] = {}
    for (key, tokens), (_, others) in zip(long, long[1:] + long[:1], strict=True):
        if tokens[_INTACT:] != others[_INTACT:] and len(ruined) < count:
            mixed = tokens[:_INTACT] + others[_INTACT:]
            ruined[f"{key}/ruin"] = Damaged(key, "ruin", mixed, _INTACT)
    return ruined
