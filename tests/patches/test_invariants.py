"""The invariants inside real engines: they fire on what they are for, and never otherwise."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from mtppp_patches.engine_spec import EngineSpec, Invariants  # noqa: E402
from mtppp_patches.observations import (  # noqa: E402
    DRAFT_IDS,
    INVARIANTS,
    OWN_INDICES,
    Ledger,
    Place,
    Report,
)
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from relay_matrix import Arm, ArmFailed, Laboratory  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Python = Callable[[str], Path]


@dataclass(frozen=True)
class Watched(Laboratory):
    """Engines that watch their invariants.

    Attributes:
        run_dir: where the counts are kept.
    """

    run_dir: Path
    invariants: Invariants

    def _spec(self, arm: Arm) -> EngineSpec:
        spec = dataclasses.replace(super()._spec(arm), invariants=self.invariants)
        return dataclasses.replace(spec, patches=names_needed(PATCHES, spec))

    def _environment(self, arm: Arm, directory: Path) -> dict[str, str]:
        return super()._environment(arm, directory) | {"MTPPP_RUN_DIR": str(self.run_dir)}

    @property
    def counts(self) -> Mapping[str, Any]:
        record: Mapping[str, Any] = json.loads((self.run_dir / "invariants.json").read_text())
        return record


@pytest.fixture
def watched(tmp_path: Path, vllm_python: Python) -> Callable[..., Watched]:
    def make(release: str, invariants: Invariants, *scenarios: str) -> Watched:
        return Watched(
            release=release,
            model=ROOT / "cluster_configs/models/demo-glm4-moe",
            dtype="float32",
            python=vllm_python(release),
            scenarios=scenarios,
            timeout=800,
            run_dir=tmp_path,
            invariants=invariants,
        )

    return make


def test_drafts_that_stay_on_the_last_stage_stop_the_engine(
    watched: Callable[..., Watched],
) -> None:
    laboratory = watched("0.29.0", "stop", "long_outputs")
    with pytest.raises(ArmFailed, match=rf"invariant {DRAFT_IDS} does not hold in step \d+"):
        laboratory.generate(Arm("pp2-k3", 2, 3, fault="relay_off"))
    violations = laboratory.counts["violations"]
    assert violations[DRAFT_IDS] > 0
    assert violations == {**dict.fromkeys(INVARIANTS, 0), DRAFT_IDS: violations[DRAFT_IDS]}
    assert "token ids differ between" in laboratory.counts["latest"][-1]


METRICS = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
from mtppp_patches.invariants import register_metrics
register_metrics(Path(sys.argv[1]))
print(generate_latest(get_prometheus_registry()).decode())
"""


def test_the_servers_metrics_tell_what_the_engine_counted(
    tmp_path: Path, vllm_python: Python
) -> None:
    ledger = Ledger()
    ledger.take([Report(Place(1, 0), 4, index_checks=5, foreign_indices=((3, 39),))])
    ledger.write(tmp_path)
    done = subprocess.run(
        [vllm_python("0.32.0"), "-c", METRICS, tmp_path],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "patches")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    for invariant in INVARIANTS:
        own = invariant == OWN_INDICES
        label = f'{{invariant="{invariant}"}}'
        assert f"mtppp_invariant_checks_total{label} {5.0 if own else 0.0}" in lines
        assert f"mtppp_invariant_violations_total{label} {1.0 if own else 0.0}" in lines
