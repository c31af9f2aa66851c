"""Parts of the relay taken out, in a real engine: none goes unnoticed.

`test_relay.py` has the faults that only serve wrong text. Here are those that end the engine, by an
invariant or, where the stages cannot go on, before one is looked at; and the one that only costs
acceptance.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from mtppp_patches.observations import DRAFT_IDS  # noqa: E402
from relay_matrix import Arm, ArmFailed, Laboratory, without_own_embedding  # noqa: E402

RELEASE = "0.29.0"
OTHER_SIZE = "Received data size doesn't match expected size"
"""What Gloo says of a message with more in it than there is room for."""
MODELS = ROOT / "cluster_configs/models"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Python = Callable[[str], Path]


def laboratory(model: Path, python: Path) -> Laboratory:
    return Laboratory(
        RELEASE, model, "float32", python, ("ends",), timeout=800, faults_watched="count"
    )


def violated(invariants: Mapping[str, Mapping[str, int]]) -> set[str]:
    return {name for name, count in invariants["violations"].items() if count}


class AsServed(Laboratory):
    """The engine core in a process of its own, as under a server."""

    def _environment(self, arm: Arm, directory: Path) -> dict[str, str]:
        inherited = super()._environment(arm, directory)
        return inherited | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture
def shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stages that wait for each other do so for 300 s if nothing else is said.
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")


def ended_by(fault: str, python: Path, scenario: str) -> ArmFailed:
    """How an engine ends that has this fault, and is told to stop at a violation."""
    engines = AsServed(
        RELEASE,
        MODELS / "demo-glm4-moe",
        "float32",
        python,
        (scenario,),
        timeout=800,
        faults_watched="stop",
    )
    with pytest.raises(ArmFailed) as ended:
        engines.generate(Arm(f"pp2-k3-{fault}", 2, 3, fault=fault))
    failure = ended.value
    assert failure.attested["attest"] == [0, 1], failure.log[-4000:]
    return failure


def assert_stopped_by_its_drafts(failure: ArmFailed) -> None:
    named = set(re.findall(r"invariant (\w+) does not hold in step \d+", failure.log))
    assert named == {DRAFT_IDS}, failure.log[-4000:]
    assert "The ranks do not compute one model; stopping" in failure.log
    assert "EngineDeadError" in failure.log
    assert violated(failure.invariants) == {DRAFT_IDS}


def test_drafts_that_stay_on_the_last_stage_stop_an_engine_that_is_told_so(
    vllm_python: Python,
) -> None:
    assert_stopped_by_its_drafts(ended_by("relay_off", vllm_python(RELEASE), "ends"))


@pytest.mark.usefixtures("shorter_waits")
def test_the_refusal_lifted_and_nothing_else_never_serves(vllm_python: Python) -> None:
    """What public reports propose. Gloo mostly takes the narrower messages, and what the first
    stage does not get it embeds as its memory has it: that may be no token at all, before a step is
    compared."""
    failure = ended_by("gate_only", vllm_python(RELEASE), "prefix_hits")
    if not re.search(f"IndexError: index out of range in self|{OTHER_SIZE}", failure.log):
        assert_stopped_by_its_drafts(failure)


@pytest.mark.usefixtures("shorter_waits")
def test_a_receive_skipped_on_one_side_ends_the_engine_before_it_serves(
    vllm_python: Python,
) -> None:
    """The next receive takes what was left, and the one after it more than it has room for. Gloo
    ends the process then, while workers warm up: no step is served that could be compared."""
    engines = laboratory(MODELS / "demo-glm4-moe", vllm_python(RELEASE))
    with pytest.raises(ArmFailed) as ended:
        engines.generate(Arm("pp2-k3-receive_skipped", 2, 3, fault="receive_skipped"))
    failure = ended.value
    assert failure.attested["attest"] == [0, 1], failure.log[-4000:]
    assert "compile_or_warm_up_model" in failure.log
    assert OTHER_SIZE in failure.log
    assert violated(failure.invariants) == set()


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
    # All ranks agree on drafts that are only bad: no invariant is about them.
    assert faulty["invariants"]["checks"][DRAFT_IDS] > 0
    assert violated(faulty["invariants"]) == set()
    # Drafts are only proposals: the text is the same.
    texts = [[answer["text"] for answer in run["scenarios"]["ends"]] for run in (sound, faulty)]
    assert texts[0] == texts[1]
