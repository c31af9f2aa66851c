"""What one stage hands to the next, with vLLM's own model classes in process groups."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.observations import DRAFT_IDS, HANDED_OVER, OWN_INDICES, SAME_STEP
from mtppp_patches.stage_boundary import PATCH, affected

WORLD = Path(__file__).with_name("pipeline_world.py")


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


@pytest.mark.vllm
@pytest.mark.timeout(300)  # Some 15 s of CPU per family, most of it the imports of vLLM.
@pytest.mark.parametrize(
    ("release", "families"),
    [("0.29.0", ["nvidia", "dots3_note"]), ("0.32.0", ["nvidia", "amd", "dots3_note"])],
)
def test_stages_compute_what_tensor_parallelism_alone_computes(
    release: str, families: list[str], vllm_python: Callable[[str], Path]
) -> None:
    done = subprocess.run(
        [vllm_python(release), WORLD, *families],
        stdout=subprocess.PIPE,
        text=True,
        timeout=290,
        check=True,
    )
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    patched = [run for run in runs if run["patched"]]
    stock = [run for run in runs if not run["patched"]]
    assert {run["family"] for run in patched} == {run["family"] for run in stock} == set(families)
    for run in stock:
        assert run["relative_error"] > 1e-2, run
        assert not run["handed_over_equal"], run
        assert HANDED_OVER in run["violated"], run
    for run in patched:
        assert run["equal_to_tensor_only"], run  # Bit by bit, in bfloat16 too.
        assert run["relative_error"] < (1e-5 if run["dtype"] == "float32" else 5e-2), run
        assert run["handed_over_equal"], run
        assert sums_of_stages(run) == run["summed"], run
        assert run["violated"] == ([OWN_INDICES] if cuts_an_index_group(run) else []), run
        assert {SAME_STEP, DRAFT_IDS, HANDED_OVER} <= set(run["checks"]), run
        assert run["checks"].get(OWN_INDICES, 0) == run["tensor"] * run["indexers"].count("S"), run


def cuts_an_index_group(run: dict[str, Any]) -> bool:
    """Whether a stage begins with a layer that shares the indices of the one before."""
    layers = len(run["indexers"])
    starts = range(0, layers, layers // run["pipeline"])
    return any(run["indexers"][start] == "S" for start in starts)


def sums_of_stages(run: dict[str, Any]) -> list[int]:
    """All-reduces per forward pass on the ranks of the first stage and of the others.

    Two per layer, as with tensor parallelism alone, and one more in each stage that was handed
    something: its first layer's, over the sum and zeros. None inside a stage.
    """
    per_stage: int = run["summed_tensor_only"] // run["pipeline"]
    return [per_stage, per_stage + 1]
