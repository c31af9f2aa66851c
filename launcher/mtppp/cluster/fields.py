"""What the sections of the schema are made of."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationInfo,
    model_validator,
)

from mtppp.cluster.source import Problem, describe

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What relative paths in a cluster file are relative to.

    Attributes:
        directory: absolute directory of the cluster file.
        home: the operator's home directory; None when there is none.
    """

    directory: Path
    home: Path | None


class FieldErrors(ValueError):
    """Several problems found by one validator, with key paths relative to what it validates."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = tuple(problems)


def raise_if_any(problems: Sequence[Problem]) -> None:
    if problems:
        raise FieldErrors(problems)


def matching(pattern: str, wanted: str) -> AfterValidator:
    """Text that matches `pattern` as a whole; `wanted` completes "must be ..."."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value):
            return value
        raise ValueError(f"must be {wanted}; is {describe(value)}")

    return AfterValidator(check)


def _operator_path(value: object, info: ValidationInfo) -> object:
    """A path on the operator's side, made absolute."""
    if not isinstance(value, str):
        return value
    path = Path(value)
    if path.is_absolute():
        return value
    if not value:
        raise ValueError("must be a path; is empty")
    surroundings = surroundings_of(info)
    if surroundings is None:
        raise ValueError(f"must be an absolute path; is {describe(value)}")
    if path.parts[0] == "~":
        if surroundings.home is None:
            raise ValueError("must not begin with ~: the home directory is not known")
        return str(surroundings.home.joinpath(*path.parts[1:]))
    if value.startswith("~"):
        raise ValueError(f'must begin with "/" or "~/", or be relative; is {describe(value)}')
    return posixpath.normpath(surroundings.directory / path)


def surroundings_of(info: ValidationInfo) -> Surroundings | None:
    return info.context if isinstance(info.context, Surroundings) else None


Port = Annotated[StrictInt, Field(ge=1, le=MAX_PORT)]
MAX_COUNT = 1_000_000
Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
OperatorPath = Annotated[Path, BeforeValidator(_operator_path)]
UserName = Annotated[
    str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*\$?", "the name of a user on the node")
]


class Section(BaseModel):
    """A mapping in the file. A key without a value is the same as no key."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}
