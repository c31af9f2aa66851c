"""What one stage hands to the next, with vLLM's own model classes in process groups."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.observations import DRAFT_IDS, HANDED_OVER, OWN_INDICES, SAME_STEP
from mtppp_patches.releases import releases
from mtppp_patches.stage_boundary import PATCH, affected

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from class_evidence import boundary_problems, families_of, notice_problems, run  # noqa: E402


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (EngineSpec("0.29.0", "glm_moe_dsa", tensor=8, pipeline=2), True),
        (EngineSpec("0.33.0", "glm_moe_dsa", tensor=8, pipeline=2), True),
        (EngineSpec("0.32.0", "deepseek_v32", tensor=2, pipeline=3), True),
        # Up to 0.28 vLLM takes the generic implementation, on AMD up to 0.30, on CPU always.
        (EngineSpec("0.28.0", "glm_moe_dsa", tensor=8, pipeline=2), False),
        (EngineSpec("0.30.0", "glm_moe_dsa", device="rocm", tensor=8, pipeline=2), False),
        (EngineSpec("0.31.0", "glm_moe_dsa", device="rocm", tensor=8, pipeline=2), True),
        (EngineSpec("0.32.0", "glm_moe_dsa", device="cpu", tensor=2, pipeline=2), False),
        (EngineSpec("0.28.0", "dots3_note", tensor=8, pipeline=2), True),
        (EngineSpec("0.32.0", "glm_moe_dsa", tensor=1, pipeline=2), False),
        (EngineSpec("0.32.0", "glm_moe_dsa", tensor=16, pipeline=1), False),
        (EngineSpec("0.32.0", "glm4_moe", tensor=8, pipeline=2), False),
    ],
)
def test_who_needs_it(spec: EngineSpec, expected: bool) -> None:
    assert affected(spec) is expected
    assert PATCH.needed(spec) is expected


def test_all_is_on_record() -> None:
    """Every layout and precision, for each implementation of each release that leaves sums."""
    for release in releases("0.28.0", "0.33.0"):
        record = json.loads((ROOT / f"patches/evidence/{release}-classes.json").read_text())
        runs = record["runs"]["stage_boundary"]
        assert {run["family"] for run in runs} == set(families_of(release))
        for family in families_of(release):
            found = {
                (run["tensor"], run["pipeline"], run["dtype"], run["patched"])
                for run in runs
                if run["family"] == family
            }
            kinds = itertools.product((2, 4), (2,), ("float32", "bfloat16"), (False, True))
            assert found >= set(kinds), (release, family)


@pytest.mark.vllm
@pytest.mark.timeout(300)  # Some 15 s of CPU per family, most of it the imports of vLLM.
@pytest.mark.parametrize("release", ["0.29.0", "0.32.0"])
def test_stages_compute_what_tensor_parallelism_alone_computes(
    release: str, vllm_python: Callable[[str], Path]
) -> None:
    runs = run(vllm_python(release), "pipeline_world.py", *families_of(release))
    assert [*boundary_problems(runs)] == []
    assert [*notice_problems(runs)] == []
    for entry in runs:
        assert {SAME_STEP, DRAFT_IDS, HANDED_OVER} <= set(entry["checks"]), entry
        seen = entry["tensor"] * entry["indexers"].count("S") if entry["patched"] else 0
        assert entry["checks"].get(OWN_INDICES, 0) == seen, entry
