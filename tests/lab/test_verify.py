"""`mtppp verify` between real vLLM servers: what is right passes, what is wrong fails, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from verify_matrix import BASELINE, COMPARISONS, SMOKE, as_it_must_be, compare, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

# The smoke tier's margins and tests, by less. The whole tier, and the other comparisons, minutes
# each, are in docs/verify-matrix.json. A PASS takes 273 requests and 4,100 tokens, without a single
# outlier; a relay that is off damages nearly every answer, and twelve are enough for a FAIL.
SHORT = replace(SMOKE, requests=288, tokens=16, sampled=8, alone=4)
TIERS = {"pp2-mtp": SHORT, "relay-off": replace(SHORT, requests=16, tokens=20, sampled=4)}


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """Two tensor ranks, no drafts, vLLM as it ships."""
    with serving(BASELINE, 8350) as url:
        yield url


@pytest.mark.parametrize("name", TIERS)
def test_verdicts_on_real_servers(baseline: str, name: str) -> None:
    comparison = COMPARISONS[name]
    with serving(comparison.candidate, 8351) as candidate:
        outcome = compare(candidate, baseline, TIERS[name], timeout=comparison.timeout)
    assert as_it_must_be(comparison, outcome), "\n".join(outcome.lines)
    if name == "pp2-mtp":
        assert all(rate > 0.05 for rate in outcome.verdict.acceptance.rates)
        assert outcome.verdict.token_power[0.01].fails > 0.999
