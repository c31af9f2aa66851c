"""What both transports do with a command and with what it wrote."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_SHOWN_CHARACTERS = 120
_SHOWN_LINES = 5


def check_argv(argv: Sequence[str]) -> None:
    """Refuse what cannot be a command line.

    Raises:
        ValueError: there is no command, or a NUL in it, which the system would cut it at.
    """
    if not argv:
        raise ValueError("no command to run")
    if any("\0" in argument for argument in argv):
        raise ValueError(f"NUL in a command line: {shown(argv)}")


def shown(argv: Sequence[str]) -> str:
    """The command as one short line, for messages."""
    line = " ".join(shlex.join(argv).split())
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    return line[: _SHOWN_CHARACTERS - 1] + "…"


def decoded(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def last_lines(*outputs: bytes) -> list[str]:
    """The last lines of the first of `outputs` that has any."""
    for output in outputs:
        lines = decoded(output).strip().splitlines()
        if lines:
            return lines[-_SHOWN_LINES:]
    return []
