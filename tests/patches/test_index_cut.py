"""Stages cut within layers that share indices, in a real engine of GLM-5.2's architecture.

Where they may be cut the tokens are those of one stage. Elsewhere, with the refusal taken out, the
engine serves other tokens and reads what belongs to other requests; the refusal and the invariant
each keep it from that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/faults")]

from cpu_engine import engine_environment  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Invariants  # noqa: E402
from mtppp_patches.observations import OWN_INDICES, read_counts  # noqa: E402
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402

RELEASE = "0.32.0"
MODEL = ROOT / "cluster_configs/models/demo-glm-moe-dsa"
LEGAL, WITHIN = "6,6", "7,5"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Outcome:
    """What came of an engine.

    Attributes:
        runs: by name, None where it ended before.
        reads: what `foreign_reads` counted.
        checks, violations: of the invariant for indices.
    """

    runs: dict[str, Any] | None
    log: str
    reads: Counter[str]
    checks: int
    violations: int


@pytest.fixture
def serve(vllm_python: Callable[[str], Path], tmp_path: Path) -> Callable[..., Outcome]:
    def serve(
        *,
        stages: int = 2,
        cut: str = "",
        refuse: bool = True,
        invariants: Invariants = "off",
    ) -> Outcome:
        directory = tmp_path / f"{stages}-{cut}"
        directory.mkdir()
        spec = EngineSpec(
            RELEASE,
            "glm_moe_dsa",
            device="cpu",
            pipeline=stages,
            invariants=invariants,
            sample_every=1,
        )
        spec = replace(spec, patches=names_needed(PATCHES, spec))
        packages = ["mtppp_patches", "mtppp_cpu"]
        variables = {"MTPPP_ENGINE": spec.to_json(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if cut:
            variables["VLLM_PP_LAYER_PARTITION"] = cut
        if not refuse:
            packages.insert(0, "mtppp_faults")
            variables["TEST_FAULT"] = "index_cut"
        result, log = directory / "result.json", directory / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    vllm_python(RELEASE),
                    ROOT / "tests/patches/index_cut_world.py",
                    MODEL,
                    str(stages),
                    "1",
                    result,
                ],
                env={**os.environ, **engine_environment(packages, directory), **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(timeout=800)
            finally:
                # An engine that ends itself leaves workers behind; they are of its session.
                end_session(process.pid)
        reads: Counter[str] = Counter()
        for file in directory.glob("reads-*.json"):
            reads.update(json.loads(file.read_text()))
        checks, violations = read_counts(directory)
        return Outcome(
            json.loads(result.read_text()) if result.exists() else None,
            log.read_text(errors="replace"),
            reads,
            checks[OWN_INDICES],
            violations[OWN_INDICES],
        )

    return serve


def end_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_only_stages_that_begin_with_an_indexer_serve_what_one_stage_does(
    serve: Callable[..., Outcome],
) -> None:
    one = serve(stages=1).runs
    assert one is not None
    legal = serve(cut=LEGAL, invariants="stop")
    assert legal.runs is not None, legal.log[-2000:]
    for name in one:
        assert legal.runs[name]["tokens"] == one[name]["tokens"]
    assert legal.checks > 100
    assert legal.violations == 0
    # What others' prompts hold changes nothing.
    probabilities = [run["short_logprobs"] for run in legal.runs.values()]
    assert all(largest_difference(probabilities[0], other) < 1e-3 for other in probabilities)

    within = serve(cut=WITHIN, refuse=False)
    assert within.runs is not None, within.log[-2000:]
    assert within.runs["first"]["tokens"] != one["first"]["tokens"]
    assert within.reads["beyond"] > 0
    assert within.reads["others"] > 0
    canaries = [within.runs[name]["short_logprobs"] for name in ("canary", "other_canary")]
    assert largest_difference(*canaries) > 0.01


def largest_difference(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def test_the_refusal_keeps_it_from_starting(serve: Callable[..., Outcome]) -> None:
    refused = serve(cut=WITHIN)
    assert refused.runs is None
    assert "layer 7 attends with indices that layer 6 computes on another stage" in refused.log
    assert "begins at layer 6 or 10" in refused.log


def test_without_it_the_invariant_ends_the_engine(serve: Callable[..., Outcome]) -> None:
    ended = serve(cut=WITHIN, refuse=False, invariants="stop")
    assert ended.runs is None
    assert f"invariant {OWN_INDICES} does not hold in step" in ended.log
    assert "layer 7 on stage 1 tensor rank 0 used indices of another step or stage" in ended.log
    assert "The ranks do not compute one model; stopping" in ended.log
