"""What the comparison of speeds may claim: by order statistics, with few rounds nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_invariants import WAYS, median_interval, turned


@pytest.mark.parametrize(
    ("rounds", "interval"),
    # As tables of the sign test have it: 96.9 % of 6 rounds, 96.1 % of 12.
    [(5, ()), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15))],
)
def test_the_median_is_within_what_the_sign_test_leaves(
    rounds: int, interval: tuple[int, ...]
) -> None:
    assert tuple(median_interval(range(rounds, 0, -1))) == interval


def test_each_way_is_first_in_its_turn() -> None:
    ways = list(WAYS)
    assert [turned(ways, number)[0] for number in range(5)] == [*ways, ways[0]]
    assert all(sorted(turned(ways, number)) == sorted(ways) for number in range(4))
