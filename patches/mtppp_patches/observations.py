"""What ranks observe of a step, and the invariants that compare it. Pure; no torch, no vLLM.

Every rank observes the same steps: each nth that it runs. What it sees of one fits in
a few integers, so that observations of all ranks can be brought together and compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SAME_STEP = "same_step"
"""Every rank ran the same steps: the same requests, tokens and drafts of each, the same ends."""
DRAFT_IDS = "draft_ids"
"""The token ids that the first stage embedded are those that the last one verified."""
HANDED_OVER = "handed_over_equal"
"""What leaves a stage is the same on all its tensor-parallel ranks."""
OWN_INDICES = "own_indices"
"""Sparse-attention indices were computed in this step by this stage."""

INVARIANTS = (SAME_STEP, DRAFT_IDS, HANDED_OVER, OWN_INDICES)

FILE = "invariants.json"
"""Where the engine keeps the counts, in the run directory of its node."""

_KEPT = 20
_SCHEMA = 1


@dataclass(frozen=True, order=True)
class Place:
    """A rank: its stage and its tensor-parallel rank."""

    stage: int
    tensor: int

    def __str__(self) -> str:
        return f"stage {self.stage} tensor rank {self.tensor}"


@dataclass(frozen=True)
class Observation:
    """What one rank saw of one step.

    Attributes:
        step: how many steps with tokens this rank had run, counted from 1.
        plan: digest of what the scheduler asked for, since the step looked at before.
        token_ids: checksum of the ids of all tokens of the step.
        handed_over: checksums of what it handed to the next stage; none on the last.
    """

    step: int
    plan: int
    token_ids: int
    handed_over: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What one rank tells the engine from time to time.

    Attributes:
        ranks: how many ranks there are.
        index_checks: layers seen that re-use sparse-attention indices.
        foreign_indices: (step, layer) where those were not of this step and stage.
    """

    place: Place
    ranks: int
    observations: tuple[Observation, ...] = ()
    index_checks: int = 0
    foreign_indices: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Violation:
    """One invariant, broken in one step."""

    invariant: str
    step: int
    detail: str

    def __str__(self) -> str:
        return f"invariant {self.invariant} does not hold in step {self.step}: {self.detail}"


def compare(seen: Mapping[Place, Observation]) -> Iterator[tuple[str, Violation | None]]:
    """Check what all ranks saw of one step: each invariant checked, with its violation if any.

    Ranks that ran different steps have nothing else to compare.
    """
    step = next(iter(seen.values())).step
    plans = {place: observation.plan for place, observation in seen.items()}
    yield SAME_STEP, _unless_equal(SAME_STEP, step, "plans of the scheduler", plans)
    if len(set(plans.values())) > 1:
        return
    ids = {place: observation.token_ids for place, observation in seen.items()}
    yield DRAFT_IDS, _unless_equal(DRAFT_IDS, step, "token ids", ids)
    for stage in sorted({place.stage for place in seen}):
        handed = {p: o.handed_over for p, o in seen.items() if p.stage == stage and o.handed_over}
        if len(handed) > 1:
            yield HANDED_OVER, _unless_equal(HANDED_OVER, step, "tensors handed over", handed)


def _unless_equal(
    invariant: str, step: int, what: str, values: Mapping[Place, object]
) -> Violation | None:
    if len(set(values.values())) == 1:
        return None
    by_value: dict[object, list[Place]] = {}
    for place, value in sorted(values.items()):
        by_value.setdefault(value, []).append(place)
    groups = ["(" + ", ".join(map(str, places)) + ")" for places in by_value.values()]
    return Violation(invariant, step, f"{what} differ between {' and '.join(groups)}")


@dataclass
class Ledger:
    """Brings the ranks' reports together and counts.

    A rank's observations come in order, but not those of all ranks at once: one whose checksum is
    still being computed comes with a later report.
    """

    checks: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    latest: list[str] = field(default_factory=list)
    _waiting: dict[int, dict[Place, Observation]] = field(default_factory=dict)

    def take(self, reports: Iterable[Report]) -> list[Violation]:
        """Count what these reports complete; the violations among it, in order of steps."""
        found: list[Violation] = []
        for report in reports:
            self.checks[OWN_INDICES] += report.index_checks
            for step, layer in report.foreign_indices:
                detail = f"layer {layer} on {report.place} used indices of another step or stage"
                found.append(Violation(OWN_INDICES, step, detail))
            for observation in report.observations:
                seen = self._waiting.setdefault(observation.step, {})
                seen[report.place] = observation
                if len(seen) == report.ranks:
                    del self._waiting[observation.step]
                    for invariant, violation in compare(seen):
                        self.checks[invariant] += 1
                        if violation:
                            found.append(violation)
        found.sort(key=lambda violation: violation.step)
        self.violations.update(violation.invariant for violation in found)
        self.latest = [*self.latest, *map(str, found)][-_KEPT:]
        return found

    def write(self, directory: Path) -> None:
        """Put the counts into `directory`, whole or not at all."""
        record = {
            "schema": _SCHEMA,
            "checks": {name: self.checks[name] for name in INVARIANTS},
            "violations": {name: self.violations[name] for name in INVARIANTS},
            "latest": self.latest,
        }
        path = directory / FILE
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
        temporary.replace(path)


def read_counts(directory: Path) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Checks and violations by invariant, as last written to `directory`; zeros before that."""
    try:
        record = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        zeros = dict.fromkeys(INVARIANTS, 0)
        return zeros, zeros
    return record["checks"], record["violations"]
