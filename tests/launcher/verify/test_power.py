"""Power: against simulation, and at the sizes the tiers promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtppp.verify.control import FEWEST, MOST, RUINED_REQUESTS
from mtppp.verify.power import Design, fewest_outliers_not_passed
from mtppp.verify.tiers import TIERS

PAGE = Path(__file__).parents[3] / "docs" / "verify.md"


def _design(tier: str, null_rate: float = 0.0, sensitivity: float = 0.9) -> Design:
    chosen = TIERS[tier]
    return Design(chosen, chosen.requests, chosen.requests * chosen.tokens, null_rate, sensitivity)


def test_smoke_sees_one_percent_and_rarely_passes_one_in_a_thousand() -> None:
    assert _design("smoke").of_tokens(0.01).fails > 0.999
    once_in_a_thousand = _design("smoke").of_tokens(0.001)
    assert once_in_a_thousand.fails < 0.5
    assert once_in_a_thousand.not_passed > 0.8


def test_certify_sees_one_in_a_thousand() -> None:
    assert _design("certify", 1e-5).of_tokens(0.001).fails > 0.999
    assert _design("certify").of_requests(0.05, 512).fails > 0.99


@pytest.mark.parametrize("tier", list(TIERS))
def test_a_right_deployment_passes(tier: str) -> None:
    """Outliers at the tolerated rate, and no ruined request, leave the bounds below the margins."""
    design = _design(tier, null_rate=1e-4 if tier != "soak" else 5e-5)
    assert design.of_tokens(0.0).fails <= 0.001
    assert design.of_tokens(0.0).not_passed < 0.05
    assert design.of_requests(0.0, design.requests).not_passed == 0.0


def test_power_falls_with_sensitivity_and_noise() -> None:
    best = _design("smoke").of_tokens(0.003).fails
    assert _design("smoke", sensitivity=0.4).of_tokens(0.003).fails < best
    assert _design("smoke", null_rate=0.002).of_tokens(0.003).fails < best


def test_nothing_passes_where_nothing_is_seen() -> None:
    assert fewest_outliers_not_passed(9600, 0.0, TIERS["smoke"]) == 0
    assert fewest_outliers_not_passed(1000, 0.9, TIERS["smoke"]) == 0
    assert Design(TIERS["smoke"], 300, 0, 0.0, 0.9).of_tokens(0.01).fails == 0.0


@pytest.mark.parametrize("name", list(TIERS))
def test_the_page_says_what_each_tier_asks(name: str) -> None:
    tier = TIERS[name]
    ours, theirs = tier.requests + tier.sampled, tier.requests + tier.alone
    control = FEWEST + min(MOST, tier.requests * tier.tokens // 100) + RUINED_REQUESTS
    scores = 2 * tier.requests + tier.sampled + tier.alone + control
    cells = (
        name,
        f"{ours * tier.tokens:,} tokens in {ours:,} answers",
        f"{theirs * tier.tokens:,} tokens in {theirs:,}",
        f"{tier.alone * tier.tokens:,} tokens",
        f"{scores:,} answers",
    )
    assert f"| {' | '.join(cells)} |" in PAGE.read_text(encoding="utf-8").splitlines()
