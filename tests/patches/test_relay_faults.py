"""Parts of the relay taken out, in a real engine: none goes unnoticed.

`test_relay.py` has the faults that only serve wrong text. Here are those that may also end the
engine, and the one that only costs acceptance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from relay_matrix import (  # noqa: E402
    NEAR_TIE,
    Arm,
    ArmFailed,
    Laboratory,
    judge,
    without_own_embedding,
)

RELEASE = "0.29.0"
MODELS = ROOT / "cluster_configs/models"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Python = Callable[[str], Path]


def laboratory(model: Path, python: Path) -> Laboratory:
    return Laboratory(RELEASE, model, "float32", python, ("ends",), timeout=800)


# What public reports propose, the refusal lifted and nothing else done: the stages disagree on the
# width of what is sent. A receive skipped on one side only leaves a message for the next to take.
@pytest.mark.parametrize("fault", ["gate_only", "receive_skipped"])
def test_stages_that_do_not_agree_on_what_is_sent_never_serve_right(
    vllm_python: Python, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where neither notices, they wait for each other: 300 s if nothing else is said.
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
    engines = laboratory(MODELS / "demo-glm4-moe", vllm_python(RELEASE))
    run, ended = None, None
    try:
        run = engines.generate(Arm(f"pp2-k3-{fault}", 2, 3, fault=fault))
    except ArmFailed as failure:
        # Gloo or torch may notice, sooner or later and in several words; NCCL would not.
        ended = failure
    if run is None:
        assert ended is not None
        assert ended.attested["attest"] == [0, 1], "both ranks were up"
        return
    judged = judge(run, None, engines.score([run]), NEAR_TIE["float32"])
    assert sum(scenario["wrong"] for scenario in judged["scenarios"].values()) > 0


def test_a_drafter_without_its_embedding_is_seen_by_what_is_accepted(
    vllm_python: Python, tmp_path: Path
) -> None:
    python = vllm_python(RELEASE)
    model = without_own_embedding(MODELS / "demo-deepseek-v3", tmp_path / "model", python)
    engines = laboratory(model, python)
    sound = engines.generate(Arm("pp2-k3", 2, 3))
    faulty = engines.generate(Arm("pp2-k3-embedding_off", 2, 3, fault="embedding_off"))
    assert sound["accepted"] > 0.3 * sound["drafts"]
    assert faulty["accepted"] < 0.5 * sound["accepted"]
    # Drafts are only proposals: the text is the same.
    texts = [[answer["text"] for answer in run["scenarios"]["ends"]] for run in (sound, faulty)]
    assert texts[0] == texts[1]
