"""Stages cut within layers that share indices, in a real engine of GLM-5.2's architecture.

Where they may be cut the tokens are those of one stage. Elsewhere, with the refusal taken out, the
engine serves other tokens and reads what belongs to other requests; the refusal and the invariant
each keep it from that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp_patches.observations import OWN_INDICES

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from stage_evidence import (  # noqa: E402
    LEGAL,
    NOTICE,
    REFUSAL,
    WITHIN,
    Cut,
    Outcome,
    largest_difference,
    serve_cut,
)

RELEASE = "0.32.0"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def serve(vllm_python: Callable[[str], Path], tmp_path: Path) -> Callable[[Cut], Outcome]:
    def serve(case: Cut) -> Outcome:
        return serve_cut(vllm_python(RELEASE), RELEASE, case, tmp_path / case.name)

    return serve


def test_only_stages_that_begin_with_an_indexer_serve_what_one_stage_does(
    serve: Callable[[Cut], Outcome],
) -> None:
    """With two tensor-parallel ranks: patches/evidence/0.32.0-stages.json."""
    one = serve(Cut("one")).runs
    assert one is not None
    legal = serve(Cut("legal", 1, 2, LEGAL, invariants="stop"))
    assert legal.runs is not None, legal.log[-2000:]
    for name in one:
        assert legal.runs[name]["tokens"] == one[name]["tokens"]
    assert legal.checks > 100
    assert legal.violations == 0
    # What others' prompts hold changes nothing.
    probabilities = [run["short_logprobs"] for run in legal.runs.values()]
    assert all(largest_difference(probabilities[0], other) < 1e-3 for other in probabilities)

    within = serve(Cut("within", 1, 2, WITHIN, refuse=False))
    assert within.runs is not None, within.log[-2000:]
    assert within.runs["first"]["tokens"] != one["first"]["tokens"]
    assert within.reads["beyond"] > 0
    assert within.reads["others"] > 0
    canaries = [within.runs[name]["short_logprobs"] for name in ("canary", "other_canary")]
    assert largest_difference(*canaries) > 0.01


def test_the_refusal_keeps_it_from_starting(serve: Callable[[Cut], Outcome]) -> None:
    refused = serve(Cut("refused", 1, 2, WITHIN))
    assert refused.runs is None
    assert REFUSAL in refused.log
    assert "begins at layer 6 or 10" in refused.log


def test_without_it_the_invariant_ends_the_engine(serve: Callable[[Cut], Outcome]) -> None:
    ended = serve(Cut("ended", 1, 2, WITHIN, refuse=False, invariants="stop"))
    assert ended.runs is None
    assert f"invariant {OWN_INDICES} does not hold in step" in ended.log
    assert "layer 7 on stage 1 tensor rank 0 used indices of another step or stage" in ended.log
    assert NOTICE in ended.log
