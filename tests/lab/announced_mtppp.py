"""`python -m announced_mtppp`: the command, which says on standard error what step it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtppp.cli.main import main
from mtppp.console import Console, Step

BEGINS = "begins: "
INSTANT = ("model", "environment", "plan")
"""Steps that have ended before anybody could interrupt them."""

_step = Console.step


@contextmanager
def _announced(self: Console, title: str) -> Iterator[Step]:
    with _step(self, title) as step:
        print(f"{BEGINS}{title}", file=sys.stderr, flush=True)
        if title in INSTANT:
            time.sleep(2)
        yield step


if __name__ == "__main__":
    Console.step = _announced  # type: ignore[method-assign]
    main()
