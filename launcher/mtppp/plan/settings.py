"""A setting that the file leaves open, as it was judged: made or not, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that the file does not give.

    Attributes:
        name: an environment variable, or a flag of `vllm serve` without dashes.
        value: text for a variable; as in serve.args for a flag.
    """

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Withheld:
    """A setting that is often recommended and is not made here.

    Attributes:
        needs: what would have to be known; "" where knowing more would not help.
    """

    name: str
    reason: str
    needs: str = ""
