"""Baselines on disk: what one server answered, kept to judge others by when it is gone.

A stored baseline cannot score new text. It has its own greedy answers, with the tokens it would
have rather had at each position, so

- the candidate's own answer is judged as far as it is the same, and at its first other token, by
  the baseline's log probability of that;
- the candidate is forced along the stored answers and says what it would have preferred.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtppp.engine.bulk import Answer, Scores
from mtppp.verify import measure
from mtppp.verify.control import Damaged
from mtppp.verify.measure import Ends, Judged, Pair
from mtppp.verify.record import NOT_SCORED, RECORD, Likeliest, Record


@dataclass(frozen=True, slots=True)
class Compared:
    """An answer, judged by a stored one.

    Attributes:
        tokens: how many could be judged: those that are the same, and the first that is not.
        gap: of the first that is not; 0 if there is none.
        position: where it is.
    """

    tokens: int
    gap: float
    position: int


def digest(directory: Path) -> str:
    """sha256 of a baseline, for the records of those judged by it."""
    return hashlib.sha256((directory / RECORD).read_bytes()).hexdigest()


def compare(tokens: Sequence[int], stored: Sequence[int], likeliest: Likeliest) -> Compared:
    """Judge an answer up to where it parts from the stored one.

    A token that is not among the likeliest has at least the gap of the least likely of them.
    """
    for position, (token, expected) in enumerate(zip(tokens, stored, strict=False)):
        if token != expected:
            known = likeliest.at(position)
            gap = max(known.values()) - known.get(token, min(known.values()))
            return Compared(position + 1, gap, position)
    return Compared(min(len(tokens), len(stored)), 0.0, -1)


def judge_free(
    answer: Answer,
    stored: Answer,
    likeliest: Likeliest,
    *,
    above: float,
    asked: int,
    ends: Ends,
) -> Judged:
    """One answer of the candidate, or of the baseline when it answered again."""
    compared = compare(answer.tokens, stored.tokens, likeliest)
    outliers = (compared.position,) if compared.gap > above else ()
    flags = measure.flags_of(answer, asked=asked, ends=ends)
    return Judged(
        tokens=compared.tokens,
        outliers=outliers,
        confirmed=outliers,
        gap=min(1.0, compared.gap),
        flags=flags | {measure.PARTED} if outliers else flags,
    )


def free_pairs(record: Record, baseline: Record, above: float, asked: int) -> list[Pair]:
    """The candidate's answers, against the baseline's second answers to the same prompts."""
    stored, again = baseline.answers["null"], baseline.answers["again"]
    ours = record.answers.get("candidate", {})
    ends = measure.ends_of(stored.values())

    def judged(answer: Answer, key: str) -> Judged:
        likeliest = baseline.likeliest.get(key, NOT_SCORED)
        return judge_free(answer, stored[key], likeliest, above=above, asked=asked, ends=ends)

    return [
        Pair(key, kind, judged(ours[key], key), judged(again[key], key))
        for key, (kind, _) in baseline.prompts.items()
        if key in ours
    ]


def forced_pairs(record: Record, baseline: Record, above: float) -> list[Pair]:
    """What the candidate thinks of the stored answers, against what the baseline thinks of them."""
    return [
        Pair(
            key,
            kind,
            _forced(record.scores["reverse"][key], above),
            _forced(baseline.scores["null"][key], above),
        )
        for key, (kind, _) in baseline.prompts.items()
        if key in record.scores.get("reverse", {}) and key in baseline.scores["null"]
    ]


def _forced(scores: Scores, above: float) -> Judged:
    outliers = tuple(i for i, gap in enumerate(scores.gap) if gap > above)
    gap = sum(min(1.0, gap) for gap in scores.gap)
    return Judged(len(scores.gap), outliers, outliers, gap, frozenset())


def control_scores(damaged: Damaged, baseline: Record) -> Scores:
    """What the baseline would say of a damaged answer, up to its first other token."""
    compared = compare(
        damaged.tokens,
        baseline.answers["null"][damaged.key].tokens,
        baseline.likeliest[damaged.key],
    )
    gaps = [0.0] * len(damaged.tokens)
    if compared.position >= 0:
        gaps[compared.position] = compared.gap
    ones = array("l", [1] * len(gaps))
    return Scores(array("d", gaps), ones, ones, array("d", gaps))
