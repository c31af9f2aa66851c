"""What the user is told."""

from __future__ import annotations

import sys


class LabError(Exception):
    """What failed, and what to do about it."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
