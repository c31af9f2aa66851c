"""The exact tests against independent computations: scipy, enumeration, simulation."""

from __future__ import annotations

import itertools

import pytest
from scipy import stats

from mtppp.verify.statistics import (
    at_least_p,
    binomial_at_most,
    binomial_lower,
    binomial_upper,
    bootstrap_upper,
    sign_flip_p,
)

ALPHA = 0.001


@pytest.mark.parametrize(
    ("events", "trials"), [(0, 300), (0, 9600), (1, 512), (26, 262144), (150, 300), (299, 300)]
)
def test_bounds_are_clopper_and_pearsons(events: int, trials: int) -> None:
    upper = stats.beta.ppf(1 - ALPHA, events + 1, trials - events)
    assert binomial_upper(events, trials, ALPHA) == pytest.approx(upper, rel=1e-4)
    lower = stats.beta.ppf(ALPHA, events, trials - events + 1) if events else 0.0
    assert binomial_lower(events, trials, ALPHA) == pytest.approx(lower, rel=1e-4, abs=1e-9)


def test_bounds_at_the_ends() -> None:
    assert binomial_upper(300, 300, ALPHA) == 1.0
    assert binomial_upper(0, 0, ALPHA) == 1.0
    assert binomial_lower(0, 0, ALPHA) == 0.0


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.3, 0.999])
@pytest.mark.parametrize(("events", "trials"), [(0, 40), (7, 9600), (39, 40), (2000, 9600)])
def test_binomial_tail(events: int, trials: int, rate: float) -> None:
    expected = stats.binom.cdf(events, trials, rate)
    assert binomial_at_most(events, trials, rate) == pytest.approx(expected, rel=1e-6, abs=1e-200)


@pytest.mark.parametrize(
    "differences", [[1], [1, 1, -1], [3, -2, 1, 1], [0, 2, 2, -1, 4, -4, 1], [-1, -2], [0, 0]]
)
def test_sign_flips_are_those_of_an_enumeration(differences: list[int]) -> None:
    outcomes = [
        sum(sign * abs(d) for sign, d in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    at_least = sum(outcome >= sum(differences) for outcome in outcomes)
    assert sign_flip_p(differences) == at_least / len(outcomes)


def test_sign_flips_of_many_are_those_of_a_sign_test() -> None:
    assert sign_flip_p([1] * 40 + [-1] * 12) == pytest.approx(stats.binom.sf(39, 52, 0.5))
    assert sign_flip_p([8] * 400) == pytest.approx(2.0**-400)


def test_at_least_of_equal_probabilities_is_binomial() -> None:
    assert at_least_p([0.003] * 300, 6) == pytest.approx(stats.binom.sf(5, 300, 0.003))
    assert at_least_p([0.003] * 300, 0) == 1.0
    assert at_least_p([0.5, 0.5], 3) == 0.0


def test_bootstrap_is_wider_when_damage_is_in_few_prompts() -> None:
    spread = bootstrap_upper([1] * 100 + [0] * 400, 10_000, ALPHA)
    lumped = bootstrap_upper([10] * 10 + [0] * 490, 10_000, ALPHA)
    # A normal approximation: 100 events and 3.09 standard deviations of 10, or of 31.6.
    assert spread == pytest.approx(0.0131, rel=0.05)
    assert lumped == pytest.approx(0.0198, rel=0.12)
    assert bootstrap_upper([0] * 100, 10_000, ALPHA) == 0.0
