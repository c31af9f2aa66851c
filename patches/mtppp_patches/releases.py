"""The releases of vLLM that mtppp knows. Any other is refused."""

from __future__ import annotations

RELEASES = (
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)


def releases(first: str, last: str) -> tuple[str, ...]:
    """The known releases from `first` to `last`, both included."""
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]
