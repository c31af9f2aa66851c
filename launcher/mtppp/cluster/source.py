"""Where a value stands in the cluster file, and how a message says so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KeyPath = tuple[str | int, ...]
"""The keys and list positions that lead to a value, from the top: ("nodes", 1, "address")."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A cluster file and the line on which each of its values begins.

    Attributes:
        path: the file as the operator named it.
        lines: for every key path in the file the line of its key, or of its list item; from 1.
    """

    path: Path
    lines: Mapping[KeyPath, int]

    def line_of(self, key_path: KeyPath) -> int:
        """The line of `key_path`, or of the nearest thing around it that is in the file."""
        for length in range(len(key_path), 0, -1):
            if line := self.lines.get(key_path[:length]):
                return line
        return self.lines.get((), 1)

    def locate(self, key_path: KeyPath) -> str:
        """`cluster.yaml:12: nodes[1].address`, for messages about a value that is in the file."""
        where = f"{self.path}:{self.line_of(key_path)}"
        return f"{where}: {render(key_path)}" if key_path else where


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the file.

    Attributes:
        path: the key path it is about; () for the file as a whole.
        message: what is wrong and what would be right, without file, line and key path.
        line: the line, where it is not that of `path`.
    """

    path: KeyPath
    message: str
    line: int | None = None


def render(key_path: KeyPath) -> str:
    """`nodes[1].address`; a key that would be misread is quoted: `runtime.env["a b"]`."""
    text = ""
    for key in key_path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif not _PLAIN_KEY.fullmatch(key):
            text += f"[{shorten(key)}]"
        else:
            text += f".{key}" if text else key
    return text


def describe(value: object) -> str:  # noqa: PLR0911 - one for each type
    """A value as a message shows it: short, and with nothing a terminal would act on."""
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case str():
            return f"the text {shorten(value)}"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def shorten(text: str, limit: int = 60) -> str:
    """`text` in double quotes, escaped, with its end cut off when it is long."""
    quoted = json.dumps(text if len(text) <= limit else text[:limit] + "…", ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in quoted)
