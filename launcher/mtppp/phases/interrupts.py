"""Ctrl-C, and the signals that mean the same: once to stop what was started, twice to let go."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Detached(KeyboardInterrupt):
    """Interrupted once more while cleaning up: everything is left as it is, at once."""


class Interrupts:
    """Counts interruptions.

    The first raises KeyboardInterrupt, or, while something is cleaned up already, only says that
    it is; the next raises Detached.

    Attributes:
        cleaning: whether something is being cleaned up.
    """

    def __init__(self, say: Callable[[str], None], undoes: Callable[[], bool]) -> None:
        self._say = say
        self._undoes = undoes
        self._count = 0
        self.cleaning = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        self._count += 1
        if self._count > 1:
            raise Detached
        if self._undoes():
            self._say("stopping what was started; interrupt once more to leave it as it is")
        if not self.cleaning:
            raise KeyboardInterrupt


@contextmanager
def interruptible(say: Callable[[str], None], undoes: Callable[[], bool]) -> Iterator[Interrupts]:
    """Handle interruptions inside the block. A signal that is ignored, as under nohup, stays so.

    Args:
        undoes: whether something was started by now that an interruption stops.
    """
    interrupts = Interrupts(say, undoes)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, interrupts)
    try:
        yield interrupts
    finally:
        for number in handled:
            signal.signal(number, before[number])
