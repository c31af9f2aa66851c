"""`mtppp verify` between real vLLM servers: what is right passes, what is wrong fails, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from mtppp.verify.prompts import own_set
from mtppp.verify.run import Settings
from mtppp.verify.servers import Server
from mtppp.verify.session import export, score
from verify_matrix import BASELINE, COMPARISONS, SMOKE, as_it_must_be, compare, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

# The smoke tier's margins and tests, by less. The whole tier, and the other comparisons, minutes
# each, are in docs/verify-matrix.json. A PASS takes 273 requests and 4,100 tokens, without a single
# outlier; a relay that is off damages nearly every answer, and twelve are enough for a FAIL.
SHORT = replace(SMOKE, requests=288, tokens=16, sampled=8, alone=4)
# Only a PASS needs damage on purpose.
FEW = replace(SHORT, requests=16, tokens=20, sampled=4, controlled=False)


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """Two tensor ranks, no drafts, vLLM as it ships."""
    with serving(BASELINE, 8350) as url:
        yield url


def test_stages_with_drafts_pass(baseline: str) -> None:
    comparison = COMPARISONS["pp2-mtp"]
    with serving(comparison.candidate, 8351) as candidate:
        outcome = compare(candidate, baseline, SHORT, timeout=comparison.timeout)
    assert as_it_must_be(comparison, outcome), "\n".join(outcome.lines)
    assert all(rate > 0.05 for rate in outcome.verdict.acceptance.rates)
    assert outcome.verdict.token_power[0.01].fails > 0.999


def test_drafts_that_are_not_relayed_fail_at_once_and_when_judged_later(
    baseline: str, tmp_path: Path
) -> None:
    comparison, prompts = COMPARISONS["relay-off"], own_set(FEW.requests)
    settings = Settings(FEW, timeout=comparison.timeout)
    asking = {"about": {}, "progress": lambda *_: None}
    with serving(comparison.candidate, 8351) as candidate:
        outcome = compare(candidate, baseline, FEW, timeout=comparison.timeout)
        export(tmp_path, settings, prompts, candidate=Server("candidate", candidate), **asking)
    assert as_it_must_be(comparison, outcome), "\n".join(outcome.lines)
    later = score(tmp_path, settings, prompts, baseline=Server("baseline", baseline), **asking)
    assert later.verdict.outcome == outcome.verdict.outcome, "\n".join(later.lines)
    assert later.verdict.figures.affected >= 12
    assert later.verdict.cause == "", "only the candidate could have told"
