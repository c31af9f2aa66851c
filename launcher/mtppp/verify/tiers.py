"""How much is asked, and what a verdict claims. The one place of these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALPHA = 0.001
"""A right deployment gets FAIL with at most this probability, and each bound that a PASS states
holds with confidence 1 - ALPHA."""

TESTS = 3
"""Tokens, requests, sampled tokens: each has a third of ALPHA."""

HARD_GAP = 1.0
"""Nats by which the baseline must prefer another token for one to be an outlier."""

TOLERATED = 1e-4
"""Outliers per token that are never called FAIL: another layout adds up in another order, and the
baseline's agreement with itself does not show how much that is worth."""

RUINED = 3
"""Outliers that make a request a ruined one."""

CLIP = 8
"""Outliers of one prompt that count at most, so that no single prompt decides."""


@dataclass(frozen=True, slots=True)
class Tier:
    """An amount of evidence.

    Attributes:
        requests: greedy requests, each with a prompt of its own.
        tokens: at most so many tokens are generated for each.
        sampled: requests at temperature 1.
        alone: requests that the baseline repeats with nothing else running.
        controlled: whether damage is done on purpose, without which nothing is a PASS.
        token_margin: share of damaged tokens that a PASS excludes, when they are spread.
        request_margin: share of ruined requests that a PASS excludes.
    """

    name: str
    requests: int
    tokens: int
    sampled: int
    alone: int
    token_margin: float
    request_margin: float
    controlled: bool = True


TIERS: Mapping[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("smoke", 300, 32, 50, 16, token_margin=0.002, request_margin=0.025),
        Tier("certify", 512, 512, 100, 32, token_margin=0.001, request_margin=0.015),
        Tier("soak", 2048, 512, 400, 32, token_margin=0.0005, request_margin=0.005),
    )
}

SMOKE = "smoke"

GLANCE = Tier("glance", 16, 8, 0, 0, token_margin=0.002, request_margin=0.025, controlled=False)
"""What a launch ends with where no baseline is named: seconds, and never a PASS."""
