"""What `scripts/relay_matrix.py` calls right and wrong, on made-up answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from relay_matrix import (
    errors_in,
    judge,
    judge_greedy,
    judge_sampled,
    judge_structured,
    key_of,
    tokens_of,
)

Answer = dict[str, Any]


def answer(*steps: list[int], finish: str = "length", **more: Any) -> Answer:
    base = {"prompt": [1, 2], "regex": None, "sampled": False, "text": ""}
    return base | {"steps": list(steps), "finish": finish} | more


def gaps(*answers: Answer, **at: float) -> dict[str, list[dict[str, float]]]:
    """All tokens are the best, except at the positions given as `at0=gap`."""
    return {
        key_of(a): [{"gap": at.get(f"at{i}", 0.0), "best": 0.9} for i, _ in enumerate(tokens_of(a))]
        for a in answers
    }


GOOD = answer([5], [6, 7, 8], [9])


def greedy(
    ours: Answer, theirs: Answer | None, scores: Any, *, preempted: bool = False
) -> dict[str, Any]:
    return judge_greedy([(ours, theirs)], scores, 0.01, preempted=preempted)


def test_the_same_steps_are_right() -> None:
    judged = greedy(GOOD, dict(GOOD), gaps(GOOD))
    assert judged["right"]
    assert (judged["same_steps"], judged["other_steps"]) == (1, 0)


def test_a_token_far_from_the_best_is_wrong() -> None:
    judged = greedy(GOOD, None, gaps(GOOD, at2=0.02))
    assert (judged["right"], judged["wrong"], judged["largest_gap"]) == (False, 1, 0.02)


def test_a_near_tie_is_not() -> None:
    judged = greedy(GOOD, None, gaps(GOOD, at2=0.009))
    assert (judged["right"], judged["wrong"], judged["not_best"]) == (True, 0, 1)


@pytest.mark.parametrize(
    "other",
    [
        answer([5], [6, 7], [8], [9]),  # fewer accepted, the same tokens
        answer([5], [6, 7, 8]),  # ends early
        answer([5], [6, 7, 8], [9], finish="stop"),
    ],
)
def test_other_steps_than_the_references_are_wrong(other: Answer) -> None:
    assert greedy(other, GOOD, gaps(GOOD, other))["other_steps"] == 1
    assert not greedy(other, GOOD, gaps(GOOD, other))["right"]


def test_steps_are_not_compared_after_a_near_tie_an_abort_or_a_preemption() -> None:
    flipped = answer([5], [6, 3], [4], [4])
    assert greedy(flipped, GOOD, gaps(GOOD, flipped))["right"]
    aborted = answer([5], finish="abort")
    assert greedy(aborted, GOOD, gaps(GOOD, aborted))["right"]
    slower = answer([5], [6], [7], [8], [9])
    assert greedy(slower, GOOD, gaps(GOOD, slower), preempted=True)["right"]


def test_a_request_without_an_answer_is_wrong() -> None:
    assert not greedy(answer(), None, {})["right"]


@pytest.mark.parametrize(
    ("text", "finish", "invalid"), [("12", "stop", 0), ("1x", "stop", 1), ("12", "length", 1)]
)
def test_what_a_grammar_constrains_obeys_it(text: str, finish: str, invalid: int) -> None:
    ours = answer([5], finish=finish, regex="[0-9]{2}", text=text)
    judged = judge_structured([(ours, dict(ours))])
    assert judged["invalid"] == invalid
    assert judged["right"] == (invalid == 0)


def test_what_a_grammar_constrains_is_what_the_reference_yields() -> None:
    ours = answer([5], finish="stop", regex="[0-9]{2}", text="12")
    theirs = answer([6], finish="stop", regex="[0-9]{2}", text="13")
    assert not judge_structured([(ours, theirs)])["right"]


def run_of(*answers: Answer, violations: int = 0) -> dict[str, Any]:
    return {
        "scenarios": {"structured": list(answers)},
        "preemptions": {"structured": 0},
        "invariants": {"checks": {"same_step": 5}, "violations": {"same_step": violations}},
        **dict.fromkeys(("drafts", "accepted", "prefix_hits", "padded_first_steps", "attested")),
    }


CONSTRAINED = answer([5], finish="stop", regex="[0-9]{2}", text="12")


def test_what_a_grammar_leaves_free_is_judged_beside_what_it_constrains() -> None:
    assert judge(run_of(CONSTRAINED, GOOD), None, gaps(GOOD), 0.01)["right"]
    assert not judge(run_of(CONSTRAINED, GOOD), None, gaps(GOOD, at1=9.0), 0.01)["right"]


def test_a_violated_invariant_is_wrong() -> None:
    assert not judge(run_of(GOOD, violations=1), None, gaps(GOOD), 0.01)["right"]


@pytest.mark.parametrize(("best_of_10", "right"), [(9, True), (5, False), (10, True)])
def test_drawing_the_best_as_often_as_probable(best_of_10: int, right: bool) -> None:
    ours = answer([1] * 100, sampled=True)
    entries = [{"gap": 0.0 if i % 10 < best_of_10 else 1.0, "best": 0.9} for i in range(100)]
    for theirs, same in ((dict(ours), 1), (ours | {"steps": [[2] * 100]}, 0), (None, 0)):
        judged = judge_sampled([(ours, theirs)], {key_of(ours): entries})
        assert (judged["right"], judged["same_draws"]) == (right, same)


def test_the_lines_that_name_an_error() -> None:
    assert errors_in("a\nValueError: b\nc\n") == "ValueError: b"
    assert errors_in("a\n\nb\n") == "a\nb"
