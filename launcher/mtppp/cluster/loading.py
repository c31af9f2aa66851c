"""Reading a cluster file: all that is wrong with it at once, or a valid `Cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from mtppp.cluster.fields import Surroundings
from mtppp.cluster.messages import problems_of, unknown_keys
from mtppp.cluster.reader import read_document
from mtppp.cluster.schema import Cluster
from mtppp.cluster.source import KeyPath, Problem, Source, render
from mtppp.errors import ConfigurationError

MAX_BYTES = 256 * 1024
MAX_PROBLEMS_SHOWN = 50

_HINT = "mend what is named above and run the command again; nothing was started"


class Loaded(NamedTuple):
    """A valid cluster, and where each of its values stands."""

    cluster: Cluster
    source: Source


def load(path: Path) -> Loaded:
    """Read and validate a cluster file.

    Raises:
        ConfigurationError: the file cannot be read or is not valid. `details` has one line for
            each problem, in the order of the file: `cluster.yaml:12: nodes[1].adress: ...`.
    """
    return parse(_read(path), path)


def parse(text: str, path: Path) -> Loaded:
    """Validate the text of a cluster file.

    Args:
        path: what messages call it; relative paths in it start at its directory.

    Raises:
        ConfigurationError: as `load`.
    """
    document = read_document(text)
    source = Source(path, document.lines)
    problems = document.problems
    if not document.complete:
        raise _invalid(source, problems)
    if document.value is None and not problems:
        hint = "it needs at least name, model, nodes and runtime"
        raise ConfigurationError(f"{path}: the file is empty", hint=hint)
    cluster, found = _validate(document.value, _surroundings(path))
    problems = [*problems, *(problem for problem in found if problem.path not in document.lost)]
    if cluster is None or problems:
        raise _invalid(source, problems)
    return Loaded(cluster, source)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "name a cluster file, or go to a directory that has a cluster.yaml"
        raise ConfigurationError(f"{path}: no such file", hint=hint) from None
    except IsADirectoryError:
        hint = f"name the file in it, such as {path / 'cluster.yaml'}"
        raise ConfigurationError(f"{path}: is a directory", hint=hint) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigurationError(
            f"{path}: larger than {MAX_BYTES // 1024} KiB", hint="is it a cluster file?"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line}: not UTF-8 text", hint="save the file as UTF-8"
        ) from None


def _surroundings(path: Path) -> Surroundings:
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    return Surroundings(directory=path.absolute().parent, home=home)


def _validate(value: object, surroundings: Surroundings) -> tuple[Cluster | None, list[Problem]]:
    """The cluster, or None and what is wrong.

    An unknown key keeps pydantic from comparing values with each other. So that it hides no
    other problem, it is noted, taken out, and the rest validated again.
    """
    try:
        return Cluster.model_validate(value, context=surroundings), []
    except ValidationError as error:
        unknown = unknown_keys(error)
        if not unknown:
            return None, problems_of(error)
    value = deepcopy(value)
    for problem in unknown:
        _remove(value, problem.path)
    _, others = _validate(value, surroundings)
    return None, unknown + others


def _remove(value: Any, path: KeyPath) -> None:
    for key in path[:-1]:
        value = value[key]
    del value[path[-1]]


def _invalid(source: Source, problems: Sequence[Problem]) -> ConfigurationError:
    lines = sorted(
        (problem.line or source.line_of(problem.path), i, problem)
        for i, problem in enumerate(problems)
    )
    details = [_text(source, line, problem) for line, _, problem in lines[:MAX_PROBLEMS_SHOWN]]
    if hidden := len(lines) - len(details):
        details.append(f"and {hidden} more")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigurationError(f"{source.path} has {count}", hint=_HINT, details=details)


def _text(source: Source, line: int, problem: Problem) -> str:
    key_path = f"{render(problem.path)}: " if problem.path else ""
    return f"{source.path}:{line}: {key_path}{problem.message}"
