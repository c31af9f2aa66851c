"""Flags of `serve.args` on which the Plan depends, read strictly.

A flag that only vLLM reads is passed on as it stands; one that decides what is right, or what fits,
must mean here what it means there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtppp.cluster.source import KeyPath, describe
from mtppp.errors import ConfigurationError


class FlagError(ConfigurationError):
    """A flag whose value the Plan cannot read.

    Attributes:
        key_path: the flag's, in the file.
    """

    def __init__(self, flag: str, problem: str) -> None:
        super().__init__(
            f"serve.args.{flag}: {problem}",
            hint="the Plan depends on this flag, so it is not left to vLLM to read it",
        )
        self.key_path: KeyPath = ("serve", "args", flag)


def switch(args: Mapping[str, Any], flag: str) -> bool:
    """Whether a flag is on; off when the file says nothing.

    Raises:
        FlagError: its value is of another kind; likewise below.
    """
    return bool(_typed(args, flag, "true or false", lambda value: isinstance(value, bool)))


def count(args: Mapping[str, Any], flag: str) -> int | None:
    """A whole number of at least 1; None when the file says nothing."""

    def is_count(value: Any) -> bool:
        return type(value) is int and value >= 1

    number: int | None = _typed(args, flag, "a whole number of at least 1", is_count)
    return number


def share(args: Mapping[str, Any], flag: str) -> float | None:
    """A number above 0, at most 1; None when the file says nothing."""

    def is_share(value: Any) -> bool:
        return type(value) in {int, float} and 0 < value <= 1

    number: float | None = _typed(args, flag, "a number above 0, at most 1", is_share)
    return number


def text(args: Mapping[str, Any], flag: str) -> str | None:
    """A text; None when the file says nothing."""
    value: str | None = _typed(args, flag, "text", lambda value: isinstance(value, str))
    return value


def _typed(args: Mapping[str, Any], flag: str, kind: str, holds: Callable[[Any], bool]) -> Any:
    value = args.get(flag)
    if value is not None and not holds(value):
        raise FlagError(flag, f"must be {kind}; is {describe(value)}")
    return value
