"""Ports for servers that are started when their port is known already."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, OF_EACH_WORKER = 27000, 500
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_START = FIRST + OF_EACH_WORKER * _WORKER
_NUMBERS = itertools.cycle(range(_START, _START + OF_EACH_WORKER))


def free_port() -> int:
    """A port of this machine that nothing uses.

    Of a range that no other worker of the tests takes from, nor the kernel for those who name no
    port: one that it had just handed out and got back may be somebody else's when it is needed.
    """
    for port in _NUMBERS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("there is no end to the numbers")
