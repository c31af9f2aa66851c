"""Number formats, told by log probabilities: of a real server in bfloat16, and of finer ones."""

from __future__ import annotations

import random

from replay import recording

from mtppp.verify.formats import COARSE, FINE, format_of, gaps_of


def test_what_a_real_server_in_bfloat16_said_is_told() -> None:
    assert format_of(gap for one in recording().all for gap in one.other_gap) == COARSE
    # Also of tokens that are far from the best, whose logits are small and finer.
    assert format_of(pair[0][0] for pair in recording().damaged) == COARSE


def test_finer_ones_are_told() -> None:
    chance = random.Random(1)
    assert format_of(round(chance.uniform(0, 12), 4) for _ in range(400)) == FINE


def test_without_enough_that_tells_nothing_is_said() -> None:
    assert format_of([0.0] * 1000) == ""
    assert format_of([1.5] * 20) == ""
    mixed = [i / 128 for i in range(3, 103)] + [i / 100 + 0.001 for i in range(3, 203)]
    assert format_of(mixed) == ""


def test_gaps_of_the_likeliest() -> None:
    assert gaps_of([{1: -0.5, 2: -1.5}, {3: -0.1}]) == [0.0, 1.0, 0.0]
