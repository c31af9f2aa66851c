"""`mtppp verify` between real vLLM servers: what is right passes, what is wrong fails, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from verify_matrix import BASELINE, COMPARISONS, as_it_must_be, compare, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """Two tensor ranks, no drafts, vLLM as it ships."""
    with serving(BASELINE, 8350) as url:
        yield url


# The others, minutes each, are in docs/verify-matrix.json.
@pytest.mark.parametrize("name", ["pp2-mtp", "relay-off"])
def test_verdicts_on_real_servers(baseline: str, name: str) -> None:
    comparison = COMPARISONS[name]
    with serving(comparison.candidate, 8351) as candidate:
        outcome = compare(candidate, baseline, comparison)
    assert as_it_must_be(comparison, outcome), "\n".join(outcome.lines)
    if name == "pp2-mtp":
        assert all(rate > 0.05 for rate in outcome.verdict.acceptance.rates)
        assert outcome.verdict.token_power[0.01].fails > 0.999
