"""Writes YAML for people: keys in their order, a comment where there is something to say."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mtppp.cluster.source import KeyPath

_WIDTH = 98
_LIKE_A_NUMBER = re.compile(r"[0-9][0-9.]*")
_SECTION_DEPTH = 2
"""Mappings below are values of one flag and stand on one line."""


def write_yaml(
    document: Mapping[str, Any], comments: Mapping[KeyPath, str], header: str = ""
) -> str:
    """The document as YAML text.

    Args:
        comments: by key path; one stands behind its value where the line stays short, else above.
        header: comment at the top, its paragraphs separated by empty lines.
    """
    lines = [*_comment(header, ""), ""] if header else []
    for key, value in document.items():
        block = list(_entry((key,), key, value, comments, ""))
        is_section = isinstance(value, dict | list) and value
        if is_section and lines and lines[-1]:
            lines.append("")
        lines += block
        if is_section:
            lines.append("")
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines) + "\n"


def _entry(
    path: KeyPath, key: str, value: Any, comments: Mapping[KeyPath, str], indent: str
) -> Iterator[str]:
    start = f"{indent}{_scalar(key)}:"
    comment = comments.get(path, "")
    if isinstance(value, dict) and value and len(path) <= _SECTION_DEPTH:
        yield from _with_comment(start, comment, indent)
        for name, inner in value.items():
            yield from _entry((*path, name), name, inner, comments, f"{indent}  ")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield from _with_comment(start, comment, indent)
        for index, item in enumerate(value):
            line = f"{indent}  - {_flow(item)}"
            yield from _with_comment(line, comments.get((*path, index), ""), f"{indent}  ")
    else:
        yield from _with_comment(f"{start} {_flow(value)}".rstrip(), comment, indent)


def _with_comment(line: str, comment: str, indent: str) -> Iterator[str]:
    if not comment:
        yield line
    elif "\n" not in comment and len(line) + len(comment) + 3 <= _WIDTH:
        yield f"{line} # {comment}"
    else:
        yield from _comment(comment, indent)
        yield line


def _comment(text: str, indent: str) -> Iterator[str]:
    for paragraph in text.split("\n"):
        wrapped = textwrap.wrap(paragraph, _WIDTH - len(indent) - 2, break_on_hyphens=False)
        yield from (f"{indent}# {line}".rstrip() for line in wrapped or [""])


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict | list):
        text = yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True
        )
        return str(text).strip()
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and _LIKE_A_NUMBER.fullmatch(value):
        return f'"{value}"'
    dumped: str = yaml.safe_dump(value, width=10_000, allow_unicode=True)
    text = dumped.removesuffix("...\n").strip()
    if text.startswith("'") and '"' not in text and "\\" not in text and "''" not in text:
        return f'"{text[1:-1]}"'
    return text
