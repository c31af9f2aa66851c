"""Exact tests and bounds. Pure; the standard library alone, so that the install stays light.

Everything here is one-sided: more events than expected is what a fault looks like.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable, Sequence

BOOTSTRAP_DRAWS = 5000


def binomial_upper(events: int, trials: int, alpha: float) -> float:
    """The rate below which the true one is, with confidence 1 - alpha (Clopper and Pearson)."""
    if trials == 0 or events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if binomial_at_most(events, trials, middle) > alpha:
            low = middle
        else:
            high = middle
    return high


def binomial_lower(events: int, trials: int, alpha: float) -> float:
    """The rate above which the true one is, with confidence 1 - alpha; 0 without trials."""
    return 1.0 - binomial_upper(trials - events, trials, alpha) if trials else 0.0


def binomial_at_most(events: int, trials: int, rate: float) -> float:
    """P(X <= events) for X ~ Binomial(trials, rate)."""
    if events < 0:
        return 0.0
    if events >= trials or rate <= 0.0:
        return 1.0
    if rate >= 1.0:
        return 0.0
    term = math.exp(
        math.lgamma(trials + 1)
        - math.lgamma(events + 1)
        - math.lgamma(trials - events + 1)
        + events * math.log(rate)
        + (trials - events) * math.log1p(-rate)
    )
    if term == 0.0:
        return 1.0 if events > trials * rate else 0.0
    odds = (1 - rate) / rate
    total, mode = 0.0, trials * rate
    for count in range(events, -1, -1):
        total += term
        if count < mode and term < 1e-17 * total:
            break
        term *= count / (trials - count + 1) * odds
    return min(1.0, total)


def sign_flip_p(differences: Iterable[int]) -> float:
    """P(a sum at least as large), were each pair's two members swapped by the toss of a coin.

    Exact whatever the dependence within a pair, so long as the two are exchangeable. All pairs of
    one prompt must be added up before, since tokens of one prompt are not independent.

    The counts of the 2^m outcomes are the coefficients of the product of (1 + x^|d|): one long
    integer holds them, m + 1 bits each.
    """
    sizes = [d for d in differences if d]
    if not sizes:
        return 1.0
    bits = len(sizes) + 1
    product = 1
    for size in sizes:
        product += product << (abs(size) * bits)
    at_least = sum(size for size in sizes if size > 0)
    # The sum of the digits of a number in base b is that number modulo b - 1.
    outcomes: int = (product >> (at_least * bits)) % ((1 << bits) - 1)
    return outcomes / (1 << len(sizes))


def at_least_p(probabilities: Iterable[float], events: int) -> float:
    """P(at least `events`) of independent events with these probabilities."""
    if events <= 0:
        return 1.0
    fewer = [1.0] + [0.0] * (events - 1)
    reached = 0.0
    for p in probabilities:
        reached += fewer[-1] * p
        for count in range(events - 1, 0, -1):
            fewer[count] += (fewer[count - 1] - fewer[count]) * p
        fewer[0] *= 1 - p
    return min(1.0, reached)


def bootstrap_upper(counts: Sequence[int], units: int, alpha: float) -> float:
    """Upper bound of sum(counts) / units when prompts, one a count, are drawn anew.

    Each prompt gets a Poisson(1) weight, so that only those with something need be drawn.
    """
    sizes = [count for count in counts if count]
    if not sizes or not units:
        return 0.0
    draw = random.Random(0)  # noqa: S311 - reproducible, not secret
    cumulative = [sum(math.exp(-1) / math.factorial(k) for k in range(n + 1)) for n in range(9)]
    sums: list[int] = sorted(
        sum(map(operator.mul, sizes, draw.choices(range(9), cum_weights=cumulative, k=len(sizes))))
        for _ in range(BOOTSTRAP_DRAWS)
    )
    return sums[math.ceil((1 - alpha) * BOOTSTRAP_DRAWS) - 1] / units
