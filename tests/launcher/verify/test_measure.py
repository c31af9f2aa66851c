"""Outliers, flags and the threshold, by hand; and damage on purpose."""

from __future__ import annotations

import random
from array import array

import pytest

from mtppp.engine.bulk import Answer, Scores
from mtppp.verify.control import damage, ruin
from mtppp.verify.measure import (
    Ends,
    ends_of,
    flags_of,
    judge_answer,
    loops,
    threshold,
)


def scores(*gaps: float) -> Scores:
    ones = array("l", [1] * len(gaps))
    return Scores(array("d", gaps), ones, ones, array("d", gaps))


ENDS = Ends(always=frozenset({1}), never=frozenset({5, 6}))


@pytest.mark.parametrize(
    ("tokens", "finish", "flags"),
    [
        ((5, 6, 7, 8), "length", set()),
        ((5, 1), "stop", set()),
        ((), "stop", {"empty"}),
        ((5, 6), "length", {"truncated"}),
        ((5, 6), "abort", {"truncated"}),
        ((5, 6, 7, 8, 9), "length", {"overlong"}),
        ((5, 1, 7, 8), "length", {"end within"}),
        ((5, 7), "stop", set()),
        ((5, 6), "stop", {"cut short"}),
    ],
)
def test_flags(tokens: tuple[int, ...], finish: str, flags: set[str]) -> None:
    assert flags_of(Answer(tokens, finish), asked=4, ends=ENDS) == flags


def test_loops_are_told_from_repetition() -> None:
    assert loops([3] * 24)
    assert not loops([3] * 20)
    assert loops([1, 2, 3, *[7, 8, 9] * 8])
    assert not loops([7, 8, 9] * 5)
    assert not loops(list(range(200)))


def test_ends_are_told_from_what_is_within() -> None:
    answers = [Answer((5, 1), "stop"), Answer((9, 5, 2), "stop"), Answer((2, 4), "length")]
    assert ends_of(answers) == Ends(always=frozenset({1}), never=frozenset({5, 9}))


def test_an_outlier_is_confirmed_by_scoring_again() -> None:
    answer = Answer((5, 6, 7), "length")
    first = scores(0.0, 1.5, 3.0)
    judged = judge_answer(answer, first, scores(0, 0.2, 3.0), above=1.0, asked=3, ends=ends_of([]))
    assert (judged.outliers, judged.confirmed) == ((1, 2), (2,))
    assert judged.gap == 2.0
    untried = judge_answer(answer, first, None, above=1.0, asked=3, ends=ends_of([]))
    assert untried.confirmed is None


def test_the_tail_of_the_null_raises_the_threshold_only_when_it_is_known() -> None:
    noisy = scores(*[0.0] * 997, *[4.0] * 3)
    few = {f"p{i}": noisy for i in range(20)}
    assert threshold(few, list(few)) == (1.0, False)
    many = {f"p{i}": noisy for i in range(200)}
    assert threshold(many, list(many)) == (4.0, True)
    quiet = {f"p{i}": scores(*[0.5] * 1000) for i in range(200)}
    assert threshold(quiet, list(quiet)) == (1.0, False)


def test_damage_changes_one_place() -> None:
    draw = random.Random(1)
    answers = {f"p{i}": [draw.randrange(9) for _ in range(12)] for i in range(40)}
    damaged = damage(answers, 60, seed=3)
    assert len(damaged) == 60
    assert {one.kind for one in damaged.values()} == {"swap", "duplicate", "drop"}
    for one in damaged.values():
        sound = answers[one.key]
        assert list(one.tokens) != sound
        assert list(one.tokens[: one.position]) == sound[: one.position]
        assert one.tokens[one.position] != (*sound, None)[one.position]
        assert len(one.tokens) - len(sound) == {"swap": 0, "duplicate": 1, "drop": -1}[one.kind]
    assert damage(answers, 60, seed=3) == damaged


def test_nothing_is_damaged_where_all_tokens_are_alike() -> None:
    assert damage({"p": [4] * 30, "q": [4], "r": []}, 50, seed=1) == {}
    assert ruin({"p": [4] * 30, "q": [4] * 30}, 20) == {}


def test_ruined_answers_are_of_other_requests() -> None:
    answers = {f"p{i}": [i] * 10 for i in range(5)}
    ruined = ruin(answers, 3)
    assert len(ruined) == 3
    assert ruined["p0/ruin"].tokens == (0, 0, *[1] * 8)
