"""MTP over stages in a real engine: right as launched, and found wrong with parts taken out.

Minutes on two CPU cores; what all releases and conditions give is in patches/evidence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from mtppp_patches.observations import DRAFT_IDS  # noqa: E402
from relay_matrix import (  # noqa: E402
    NEAR_TIE,
    Arm,
    Laboratory,
    judge,
    reference_of,
)

RELEASE = "0.29.0"
DTYPE = "float32"
SOUND = Arm("pp2-k3", 2, 3)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def faulty(fault: str) -> Arm:
    return replace(SOUND, name=f"{SOUND.name}-{fault}", fault=fault)


def test_the_relay_is_right_and_its_absence_is_found(vllm_python: Callable[[str], Path]) -> None:
    engines = Laboratory(
        RELEASE,
        ROOT / "cluster_configs/models/demo-glm4-moe",
        DTYPE,
        vllm_python(RELEASE),
        ("ends", "aborts", "structured"),
        timeout=600,
    )
    # Each fault with the scenario that shows it.
    ends, aborts, structured = (
        replace(engines, scenarios=(name,), faults_watched="count") for name in engines.scenarios
    )
    reference, sound = engines.generate(reference_of(SOUND)), engines.generate(SOUND)
    zeros, lost = (ends.generate(faulty(fault)) for fault in ("relay_off", "rows_lost"))
    mixed = aborts.generate(faulty("slots_mixed"))
    unconstrained = structured.generate(faulty("grammar_off"))
    gaps = engines.score([reference, sound, unconstrained, zeros, lost, mixed])

    def judged(run: dict[str, Any]) -> dict[str, Any]:
        return judge(run, reference, gaps, NEAR_TIE[DTYPE])

    right = judged(sound)
    assert right["right"], right
    assert right["attested"]["draft_relay"] == [0, 1]
    assert sum(scenario["same_steps"] for scenario in right["scenarios"].values()) > 20
    assert right["scenarios"]["structured"]["constrained"] > 15

    assert sum(scenario["wrong"] for scenario in judged(zeros)["scenarios"].values()) > 20
    assert zeros["accepted"] / zeros["drafts"] < sound["accepted"] / sound["drafts"]
    # Few requests end in just the step that loses their row.
    assert sum(scenario["wrong"] for scenario in judged(lost)["scenarios"].values()) > 0
    assert judged(mixed)["scenarios"]["aborts"]["wrong"] > 0
    for run in (zeros, lost, mixed):
        violations = run["invariants"]["violations"]
        assert {name for name, count in violations.items() if count} == {DRAFT_IDS}, violations
    assert judged(unconstrained)["scenarios"]["structured"]["invalid"] > 0
