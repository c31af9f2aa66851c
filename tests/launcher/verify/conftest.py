"""A real HTTP server in place of vLLM's, as well or as badly behaved as a test wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replay import Replay


@pytest.fixture
def replays() -> Iterator[list[Replay]]:
    """Servers put here are stopped after the test."""
    servers: list[Replay] = []
    yield servers
    for server in servers:
        server.stop()
