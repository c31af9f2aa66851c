"""What the ranks' observations say together."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtppp_patches.invariants import digest
from mtppp_patches.observations import (
    DRAFT_IDS,
    HANDED_OVER,
    INVARIANTS,
    OWN_INDICES,
    SAME_STEP,
    Ledger,
    Observation,
    Place,
    Report,
    Violation,
    read_counts,
)

RANKS = [Place(stage, tensor) for stage in range(2) for tensor in range(2)]


def observation(place: Place, step: int = 7) -> Observation:
    """What a rank sees when all is well."""
    handed_over = () if place.stage == 1 else (step * 11, step * 13)
    return Observation(step, plan=step * 5, token_ids=step * 3, handed_over=handed_over)


def reports(*changed: tuple[Place, dict[str, object]]) -> list[Report]:
    """One report of each rank about step 7, with some of it changed."""
    seen = {place: observation(place) for place in RANKS}
    for place, changes in changed:
        seen[place] = dataclasses.replace(seen[place], **changes)  # type: ignore[arg-type]
    return [Report(place, len(RANKS), (seen[place],)) for place in RANKS]


def test_all_is_well() -> None:
    ledger = Ledger()
    assert ledger.take(reports()) == []
    assert dict(ledger.checks) == {OWN_INDICES: 0, SAME_STEP: 1, DRAFT_IDS: 1, HANDED_OVER: 1}
    assert not ledger.violations


@pytest.mark.parametrize(
    ("place", "changes", "invariant", "detail"),
    [
        (
            Place(0, 1),
            {"handed_over": (77, 1)},
            HANDED_OVER,
            "tensors handed over differ between (stage 0 tensor rank 0) and "
            "(stage 0 tensor rank 1)",
        ),
        (
            Place(1, 0),
            {"token_ids": 1},
            DRAFT_IDS,
            "token ids differ between (stage 0 tensor rank 0, stage 0 tensor rank 1, "
            "stage 1 tensor rank 1) and (stage 1 tensor rank 0)",
        ),
        # A rank that ran another step has other ids, too: only the cause is named.
        (
            Place(1, 1),
            {"plan": 1, "token_ids": 1},
            SAME_STEP,
            "plans of the scheduler differ between (stage 0 tensor rank 0, stage 0 tensor rank 1, "
            "stage 1 tensor rank 0) and (stage 1 tensor rank 1)",
        ),
    ],
)
def test_each_fault_is_named_with_step_and_ranks(
    place: Place, changes: dict[str, object], invariant: str, detail: str
) -> None:
    ledger = Ledger()
    assert ledger.take(reports((place, changes))) == [Violation(invariant, 7, detail)]
    assert dict(ledger.violations) == {invariant: 1}
    assert ledger.latest == [f"invariant {invariant} does not hold in step 7: {detail}"]


def test_indices_of_another_stage_are_named_with_layer_and_rank() -> None:
    place = Place(1, 0)
    report = Report(place, len(RANKS), index_checks=4, foreign_indices=((3, 39), (3, 40)))
    ledger = Ledger()
    found = ledger.take([report])
    assert [v.step for v in found] == [3, 3]
    assert "layer 39 on stage 1 tensor rank 0" in found[0].detail
    assert ledger.checks[OWN_INDICES] == 4
    assert ledger.violations[OWN_INDICES] == 2


def test_reports_are_joined_whenever_they_come() -> None:
    """Ranks report as far as their GPUs have come; every interleaving counts the same."""
    steps = (7, 14, 21)
    for lag in itertools.product(range(3), repeat=len(RANKS)):
        ledger = Ledger()
        for round_ in range(len(steps) + 2):
            found = ledger.take(
                Report(
                    place,
                    len(RANKS),
                    tuple(observation(place, s) for i, s in enumerate(steps) if i + late == round_),
                )
                for place, late in zip(RANKS, lag, strict=True)
            )
            assert found == []
        assert ledger.checks[SAME_STEP] == len(steps)


def test_a_rank_that_missed_a_step_is_noticed_at_the_next() -> None:
    late = Place(1, 1)
    ledger = Ledger()
    ledger.take(
        Report(place, len(RANKS), (observation(place, 7), observation(place, 14)))
        for place in RANKS
        if place != late
    )
    # By its own count it is at step 7 when the others are at 14 and it runs what they run then.
    missed = dataclasses.replace(observation(late, 14), step=7)
    [violation] = ledger.take([Report(late, len(RANKS), (missed,))])
    assert violation.invariant == SAME_STEP


def test_counts_are_zero_until_written_and_survive(tmp_path: Path) -> None:
    zeros = dict.fromkeys(INVARIANTS, 0)
    assert read_counts(tmp_path) == (zeros, zeros)
    ledger = Ledger()
    ledger.take(reports((Place(0, 0), {"handed_over": (1, 1)})))
    ledger.write(tmp_path)
    checks, violations = read_counts(tmp_path)
    assert checks == {**zeros, SAME_STEP: 1, DRAFT_IDS: 1, HANDED_OVER: 1}
    assert violations == {**zeros, HANDED_OVER: 1}
    assert [p.name for p in tmp_path.iterdir()] == ["invariants.json"]
    assert "step 7" in json.loads((tmp_path / "invariants.json").read_text())["latest"][0]


def test_only_the_latest_violations_are_kept() -> None:
    ledger = Ledger()
    for step in range(100):
        ledger.take([Report(Place(1, 0), 4, foreign_indices=((step, 39),))])
    assert len(ledger.latest) == 20
    assert "step 99" in ledger.latest[-1]
    assert ledger.violations[OWN_INDICES] == 100


def test_what_a_rank_did_not_hear_shows_at_the_next_step_that_is_looked_at() -> None:
    """Ends of requests come with whichever step is next, often one without tokens."""

    def plan(tokens: dict[str, int], *ended: str) -> SimpleNamespace:
        return SimpleNamespace(
            num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={}, finished_req_ids={*ended}
        )

    def heard(*plans: SimpleNamespace) -> int:
        return functools.reduce(lambda before, asked: digest(asked, before), plans, 0)

    first, second = plan({"a": 4}), plan({"b": 4})
    assert heard(first, plan({}, "a"), second) != heard(first, plan({}), second)
    assert heard(first, plan({}, "a"), second) != heard(first, second)
    assert heard(plan({}, "a", "b")) == heard(plan({}, "b", "a"))
