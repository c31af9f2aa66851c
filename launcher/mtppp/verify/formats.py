"""What number format a server computes in, as far as its log probabilities show it. Pure.

Logits come out of the last layer in the format that the model runs in, and are made into log
probabilities in float32. The difference of two of these is that of two logits: in bfloat16,
which has eight significant bits, nearly all are multiples of 1/128. Quantized weights do not
show: their logits are bfloat16, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

COARSE = "bfloat16"
FINE = "a finer format than bfloat16"

_GRID = 1 / 128  # nats
_ROUNDING = 1.2e-4  # of what is kept in a record, twice
_FEWEST = 50


def gaps_of(positions: Iterable[Mapping[int, float]]) -> list[float]:
    """By how many nats the others of the likeliest tokens are less likely than the best."""
    return [max(one.values()) - logprob for one in positions for logprob in one.values()]


def format_of(gaps: Iterable[float]) -> str:
    """COARSE or FINE; "" when that cannot be told."""
    # A token that is the best itself tells nothing.
    told = list(islice((gap for gap in gaps if gap > 2 * _GRID), 10_000))
    if len(told) < _FEWEST:
        return ""
    on_grid = sum(abs(gap - round(gap / _GRID) * _GRID) < _ROUNDING for gap in told) / len(told)
    if on_grid > 0.5:
        return COARSE
    # By chance one in 30 is on it.
    return FINE if on_grid < 0.2 else ""
