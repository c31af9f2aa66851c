"""MTP over stages in a real engine: right as launched, and found wrong with parts taken out.

Minutes on two CPU cores; what all releases and conditions give is in patches/evidence.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_the_relay_is_right_and_its_absence_is_found(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    subprocess.run(
        [
            ROOT / "scripts/relay_matrix.py",
            "0.29.0",
            ROOT / "cluster_configs/models/demo-glm4-moe",
            "--candidates=pp2-k3",
            "--scenarios=ends,aborts,structured",
            "--faults=relay_off,grammar_off,rows_lost",
            "--timeout=600",
            f"--output={output}",
        ],
        check=False,
    )
    arms = json.loads(output.read_text())["arms"]
    sound = arms["pp2-k3"]
    assert sound["right"], sound
    assert sound["attested"]["draft_relay"] == [0, 1]
    assert sum(scenario["same_steps"] for scenario in sound["scenarios"].values()) > 20

    zeros = arms["pp2-k3-relay_off"]
    assert sum(scenario["wrong"] for scenario in zeros["scenarios"].values()) > 20
    assert zeros["accepted"] < sound["accepted"]
    # Few requests end in just the step that loses their row.
    assert sum(s["wrong"] for s in arms["pp2-k3-rows_lost"]["scenarios"].values()) > 0
    assert arms["pp2-k3-grammar_off"]["scenarios"]["structured"]["invalid"] > 0
    assert sound["scenarios"]["structured"]["constrained"] > 15
