"""Tokens sampled at temperature 1, against the baseline's probabilities. Pure.

A likelihood ratio against the baseline is a martingale with mean 1 if the tokens were drawn from
it, however they depend on each other; by Ville's inequality it reaches 1/p with probability p at
most. Ratios of several alternatives are averaged, which keeps the mean.

Of each position three outcomes have known probabilities: the likeliest token, another of the
likeliest few, and any other. So nothing need be known of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtppp.verify.tiers import TOLERATED

_REPLACED = (0.001, 0.01, 0.1)
"""Rates of a token being replaced by one that is none of the likeliest."""
_MISSED = (0.25, 0.5, 1.2, 1.5, 2.0, 4.0, 16.0)
"""How many times likelier than expected the best token is missed: below 1, too greedy."""

_BEST, _LIKELY, _OUTSIDE = range(3)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token that was sampled.

    Attributes:
        is_best: whether it is the baseline's likeliest.
        outside: whether it is none of the likeliest few.
        best: probability of the likeliest.
        rest: probability of all that are none of the likeliest few, together.
    """

    is_best: bool
    outside: bool
    best: float
    rest: float

    @property
    def outcome(self) -> int:
        return _BEST if self.is_best else _OUTSIDE if self.outside else _LIKELY


Gains = tuple[float, float, float]
"""By how much the log of a ratio grows, by the outcome of a position."""
Alternative = Callable[[Draw, float], Gains]


def _replaced(rate: float) -> Alternative:
    def gains(draw: Draw, _: float) -> Gains:
        # More than the baseline has there: rounding is no evidence. The mean is below 1 then.
        rest = min(1.0, max(0.0, draw.rest) + TOLERATED)
        kept = math.log1p(-rate)
        return kept, kept, math.log1p(rate * (1 - rest) / rest)

    return gains


def _missed(factor: float) -> Alternative:
    def gains(draw: Draw, tolerance: float) -> Gains:
        towards = tolerance if factor > 1 else -tolerance
        miss = min(1.0, max(0.0, 1 - draw.best + towards))
        scale = math.log(1 - miss + factor * miss)
        return -scale, math.log(factor) - scale, math.log(factor) - scale

    return gains


_ALTERNATIVES = (*map(_replaced, _REPLACED), *map(_missed, _MISSED))


def sampled_p(draws: Sequence[Draw], tolerance: float) -> float:
    """P(as much against the baseline's probabilities).

    Args:
        tolerance: by how much the best may be missed more often, or more seldom, than expected.
    """
    if not draws:
        return 1.0
    logs = [sum(gains(draw, tolerance)[draw.outcome] for draw in draws) for gains in _ALTERNATIVES]
    largest = max(logs)
    mean = largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))
    return math.exp(-max(0.0, mean))


def sampled_power(
    draws: Sequence[Draw], tolerance: float, *, replaced: float, alpha: float
) -> float:
    """The chance, at least, of p < alpha, were this share of the tokens replaced at random.

    That of the best of the alternatives, whose logs are sums over many tokens: nearly normal.
    """
    needed = math.log(len(_ALTERNATIVES) / alpha)
    chances = [0.0]
    for gains in _ALTERNATIVES:
        mean = variance = 0.0
        for draw in draws:
            gain = gains(draw, tolerance)
            best, rest = min(1.0, draw.best), max(0.0, draw.rest)
            kept = 1 - replaced
            shares = (kept * best, kept * max(0.0, 1 - best - rest), kept * rest + replaced)
            expected = sum(share * each for share, each in zip(shares, gain, strict=True))
            mean += expected
            variance += (
                sum(share * each**2 for share, each in zip(shares, gain, strict=True)) - expected**2
            )
        if variance > 0:
            chances.append(0.5 * math.erfc((needed - mean) / math.sqrt(2 * variance)))
    return max(chances)
