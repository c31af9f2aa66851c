"""The test of sampled tokens: right where they are drawn as they should be, sharp where not."""

from __future__ import annotations

import random

import pytest

from mtppp.verify.sampled import Draw, sampled_p, sampled_power

ALPHA = 0.001 / 3
MARGIN = 0.002
WORDS = 500


def draws(
    chance: random.Random, tokens: int, *, replaced: float = 0.0, greedy: float = 0.0
) -> list[Draw]:
    """Of a model with 500 words; the best and seven more have probabilities to speak of."""
    result = []
    for _ in range(tokens):
        best, rest = chance.choice(((0.5, 0.05), (0.9, 0.01), (0.999, 1e-5)))
        is_best = chance.random() < best
        outside = not is_best and chance.random() < rest / (1 - best)
        if chance.random() < replaced:
            word = chance.randrange(WORDS)
            is_best, outside = word == 0, word >= 8
        if chance.random() < greedy:
            is_best, outside = True, False
        result.append(Draw(is_best, outside, best, rest))
    return result


def test_tokens_of_the_baseline_itself_are_seldom_suspected() -> None:
    chance = random.Random(3)
    p = [sampled_p(draws(chance, 300), MARGIN) for _ in range(400)]
    assert sum(value <= 0.05 for value in p) <= 0.05 * 400
    assert min(p) > ALPHA
    assert sampled_p([], MARGIN) == 1.0


def test_the_mean_ratio_is_at_most_one() -> None:
    """Without that a small p would not be a rare one."""
    chance = random.Random(8)
    ratios = [1 / sampled_p(draws(chance, 20), MARGIN) for _ in range(4000)]
    # Where the ratio is below 1, p is 1: what is counted is at most the ratio plus 1.
    assert sum(ratio for ratio in ratios if ratio > 1) / len(ratios) < 1


@pytest.mark.parametrize("damage", [{"replaced": 0.05}, {"greedy": 1.0}, {"greedy": 0.7}])
def test_what_a_sampler_does_wrong_is_seen(damage: dict[str, float]) -> None:
    chance = random.Random(4)
    assert all(sampled_p(draws(chance, 1500, **damage), MARGIN) < ALPHA for _ in range(20))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "replaced"), [(250, 0.05), (1500, 0.01), (1500, 0.002)])
def test_the_power_is_what_is_found(tokens: int, replaced: float) -> None:
    chance = random.Random(5)
    sound = draws(chance, tokens)
    predicted = sampled_power(sound, MARGIN, replaced=replaced, alpha=ALPHA)
    runs = [draws(chance, tokens, replaced=replaced) for _ in range(200)]
    found = sum(sampled_p(run, MARGIN) < ALPHA for run in runs) / len(runs)
    assert abs(found - predicted) < 0.15, (found, predicted)
