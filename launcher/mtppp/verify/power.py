"""What a run would have seen: the chance of each verdict, were so much damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from mtppp.verify.statistics import binomial_at_most, binomial_upper
from mtppp.verify.tiers import ALPHA, TESTS, TOLERATED, Tier


@dataclass(frozen=True, slots=True)
class Power:
    """Chances that a run with damage is called FAIL, and that it is not called PASS."""

    fails: float
    not_passed: float


@dataclass(frozen=True, slots=True)
class Design:
    """A run, as far as its power depends on it.

    Attributes:
        requests: judged pairs of answers.
        tokens: the candidate's judged tokens, all together.
        null_rate: outliers per token where nothing is damaged.
        sensitivity: share of damaged tokens that are outliers.
    """

    tier: Tier
    requests: int
    tokens: int
    null_rate: float
    sensitivity: float

    def of_tokens(self, damaged: float) -> Power:
        """Power against this share of tokens being damaged, wherever they are."""
        if not self.tokens:
            return Power(0.0, 1.0)
        rate = min(1.0, damaged * self.sensitivity + self.null_rate)
        length = self.tokens / self.requests
        touched = 1 - (1 - rate) ** length
        touched_by_chance = 1 - (1 - self.null_rate) ** length
        fails = sum(
            chance * _at_least(fewest_that_fail(by_chance, self.requests, length), self, touched)
            for by_chance, chance in _probabilities(self.requests, touched_by_chance)
        )
        fewest = fewest_outliers_not_passed(self.tokens, self.sensitivity, self.tier)
        not_passed = 1 - binomial_at_most(fewest - 1, self.tokens, rate)
        return Power(min(1.0, fails), max(not_passed, fails))

    def of_requests(self, ruined: float, bounded: int, *, stored: bool = False) -> Power:
        """Power against this share of requests being ruined, whichever they are.

        Args:
            bounded: requests that the bound of a PASS counts, `requests` or more.
            stored: by a stored baseline, which tells one outlier of each, where it leaves the
                stored answer, and nothing of what follows.
        """
        if stored:
            fewest = fewest_that_fail(0, self.requests, self.tokens / self.requests)
        else:
            fewest = next(c for c in range(1 << 20) if 0.5**c < ALPHA / TESTS)
        excluded = next(
            (
                c
                for c in range(bounded)
                if binomial_upper(c, bounded, ALPHA) >= self.tier.request_margin
            ),
            bounded,
        )
        return Power(
            1 - binomial_at_most(fewest - 1, self.requests, ruined),
            1 - binomial_at_most(excluded - 1, bounded, ruined),
        )


def fewest_outliers_not_passed(tokens: int, sensitivity: float, tier: Tier) -> int:
    """The number of outliers from which on the bound is not below the tier's margin."""
    if sensitivity <= 0.0:
        return 0
    low, high = 0, tokens
    while low < high:
        middle = (low + high) // 2
        if binomial_upper(middle, tokens, ALPHA / 2) / sensitivity >= tier.token_margin:
            high = middle
        else:
            low = middle + 1
    return low


@cache
def fewest_that_fail(by_chance: int, requests: int, length: float) -> int:
    """Touched prompts of the candidate that make FAIL when so many of the baseline are touched.

    Args:
        requests: prompts, all together.
        length: tokens of an answer, on average.
    """
    tolerated = 1 - (1 - TOLERATED) ** length

    def fails(touched: int) -> bool:
        by_coin = 1 - binomial_at_most(touched - 1, touched + by_chance, 0.5)
        beyond_tolerated = 1 - binomial_at_most(touched - 1, requests, tolerated)
        return max(by_coin, beyond_tolerated) < ALPHA / TESTS

    low, high = by_chance, requests + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low


def _at_least(events: int, design: Design, rate: float) -> float:
    return 1 - binomial_at_most(events - 1, design.requests, rate)


def _probabilities(trials: int, rate: float) -> Iterator[tuple[int, float]]:
    """Outcomes of a binomial with their probabilities, until what is left does not matter."""
    below = 0.0
    for count in range(trials + 1):
        up_to = binomial_at_most(count, trials, rate)
        yield count, up_to - below
        if up_to > 1 - 1e-9:
            return
        below = up_to
