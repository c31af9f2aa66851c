"""From a record to counts: which tokens are outliers, which requests ruined. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtppp.engine.bulk import Answer, Scores
from mtppp.verify.control import Damaged
from mtppp.verify.tiers import HARD_GAP, RUINED

# So many tokens of the null's first half make its 99.99 % quantile known: ten lie beyond it.
_ESTIMABLE = 100_000
_TAIL = 1e-4

_LONGEST_PERIOD = 16
_REPEATS = 4
_REPEATED_TOKENS = 24

PARTED = "parted"
"""An answer left a stored baseline's with an outlier: nobody knows whether the rest is ruined."""

# Flags that mean damage by themselves. A loop alone does not: greedy text may well loop, and the
# baseline says whether it would have.
DAMAGE = frozenset({"empty", "truncated", "cut short", "overlong", "end within"})


@dataclass(frozen=True, slots=True)
class Ends:
    """How answers of the baseline end of themselves.

    A text may hold a token that ends others, if the server was told of several; such a one is
    neither.

    Attributes:
        always: tokens that end answers and are nowhere within one.
        never: tokens that are within answers and end none.
    """

    always: frozenset[int]
    never: frozenset[int]


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer under the baseline.

    Attributes:
        tokens: how many were scored.
        outliers: positions of tokens whose gap is above the threshold.
        confirmed: those of them that are so again when scored with nothing else running; None if
            that was not tried.
        gap: sum of gaps, each clipped at 1 nat.
    """

    tokens: int
    outliers: tuple[int, ...]
    confirmed: tuple[int, ...] | None
    gap: float
    flags: frozenset[str]


SPOTLESS = Judged(0, (), (), 0.0, frozenset())
"""What is held against a candidate that judges itself."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The candidate's and the baseline's own answer to one prompt."""

    key: str
    kind: str
    candidate: Judged
    null: Judged

    @property
    def confirmed(self) -> int:
        """Outliers of the candidate that count towards FAIL."""
        return len(self.candidate.confirmed or ())

    @property
    def expected(self) -> int:
        """Outliers of the baseline to hold against them; all, where they were not tried again."""
        null = self.null
        return len(null.outliers if null.confirmed is None else null.confirmed)

    @property
    def ruined(self) -> bool:
        """Whether the candidate's answer is damaged beyond single tokens."""
        return _ruined(self.confirmed, self.candidate.flags - self.null.flags)

    @property
    def may_be_ruined(self) -> bool:
        """The same for a bound: what is not known counts against it, such as outliers that were
        not scored again."""
        ours = self.candidate
        outliers = len(ours.outliers if ours.confirmed is None else ours.confirmed)
        return PARTED in ours.flags or _ruined(outliers, ours.flags - self.null.flags)

    @property
    def null_ruined(self) -> bool:
        return _ruined(self.expected, self.null.flags - self.candidate.flags)


def _ruined(outliers: int, flags: frozenset[str]) -> bool:
    return outliers >= RUINED or bool(flags & DAMAGE) or ("loop" in flags and outliers > 0)


def threshold(null: Mapping[str, Scores], order: Sequence[str]) -> tuple[float, bool]:
    """The gap above which a token is an outlier, and whether null data had a say in it.

    The null's tail raises it above 1 nat where the first half of the prompts has enough tokens;
    then only the second half may be judged by it.
    """
    first = [gap for key in order[::2] if key in null for gap in null[key].gap]
    if len(first) < _ESTIMABLE:
        return HARD_GAP, False
    beyond = sorted(first)[math.ceil((1 - _TAIL) * len(first)) - 1]
    return (beyond, True) if beyond > HARD_GAP else (HARD_GAP, False)


def judge_answer(
    answer: Answer,
    scores: Scores,
    again: Scores | None,
    *,
    above: float,
    asked: int,
    ends: Ends,
) -> Judged:
    """Judge one answer.

    Args:
        again: scores of the same tokens, alone.
        asked: tokens that were asked for.
    """
    outliers = tuple(i for i, gap in enumerate(scores.gap) if gap > above)
    confirmed = None
    if again is not None:
        confirmed = tuple(i for i in outliers if again.gap[i] > above)
    elif not outliers:
        confirmed = ()
    return Judged(
        tokens=len(scores.gap),
        outliers=outliers,
        confirmed=confirmed,
        gap=sum(min(1.0, gap) for gap in scores.gap),
        flags=flags_of(answer, asked=asked, ends=ends),
    )


def flags_of(answer: Answer, *, asked: int, ends: Ends) -> frozenset[str]:
    """What is odd about an answer, whatever the tokens mean."""
    tokens = answer.tokens
    flags = set()
    if not tokens:
        flags.add("empty")
    if answer.finish not in ("stop", "length"):
        flags.add("truncated")
    if answer.finish == "length" and len(tokens) < asked:
        flags.add("truncated")
    if len(tokens) > asked:
        flags.add("overlong")
    if ends.always.intersection(tokens[:-1]):
        flags.add("end within")
    if answer.finish == "stop" and ends.never.intersection(tokens[-1:]):
        flags.add("cut short")
    if loops(tokens):
        flags.add("loop")
    return frozenset(flags)


def loops(tokens: Sequence[int]) -> bool:
    """Whether some n-gram follows itself again and again somewhere."""
    for period in range(1, _LONGEST_PERIOD + 1):
        enough = max(_REPEATS * period, _REPEATED_TOKENS) - period
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= enough:
                return True
    return False


def ends_of(answers: Iterable[Answer]) -> Ends:
    """How these answers end; nothing is known of it where there are none."""
    answers = list(answers)
    last = {a.tokens[-1] for a in answers if a.finish == "stop" and a.tokens}
    within = {token for a in answers for token in a.tokens[:-1]}
    return Ends(frozenset(last - within), frozenset(within - last))


def seen(damaged: Damaged, scores: Scores, above: float) -> bool:
    """Whether a damaged token, or the one after it, is an outlier."""
    return any(gap > above for gap in scores.gap[damaged.position : damaged.position + 2])


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Of a distribution of gaps, in nats."""
    ordered = sorted(gaps)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {
        name: ordered[min(last, math.ceil(share * len(ordered)))]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
    }
