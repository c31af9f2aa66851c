"""What the operator's side remembers of deployments.

A cache: what runs where is decided by the nodes' own records. It lets a command be given a name
in place of a file, from any directory, and `mtppp list` know what to ask about.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError


@dataclass(frozen=True)
class Known:
    """A deployment that was launched from here, and the file it was launched from."""

    cluster: Cluster
    file: Path


def directory() -> Path:
    """Where records are: one JSON file per deployment."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "mtppp" / "deployments"


def record(cluster: Cluster, file: Path) -> str:
    """What is remembered of a deployment, here and on its nodes."""
    known = {"file": str(file.absolute()), "cluster": cluster.model_dump(mode="json")}
    return json.dumps(known, indent=1)


def parsed(text: str) -> Known | None:
    """What a record says; None when it is of another mtppp, or damaged."""
    try:
        found = json.loads(text)
        return Known(Cluster.model_validate(found["cluster"]), Path(found["file"]))
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


def remember(cluster: Cluster, file: Path) -> None:
    """Record a deployment, before anything of it is started."""
    target = directory() / f"{cluster.name}.json"
    temporary = target.with_suffix(f".{os.getpid()}")
    with _writing(target):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(record(cluster, file), encoding="utf-8")
        temporary.replace(target)


def forget(name: str) -> None:
    """Drop the record of a deployment that has ended; harmless when there is none."""
    target = directory() / f"{name}.json"
    with _writing(target):
        target.unlink(missing_ok=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Say of a record that cannot be written what to do about it.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{target}: cannot be written: {error.strerror}",
            hint="set XDG_STATE_HOME to a directory that you can write to; deployments are"
            " remembered there",
        ) from None


def known() -> dict[str, Known]:
    """All deployments remembered, by name, but for those that are `unreadable`."""
    return {name: known for name, (_, known) in _records().items() if known is not None}


def unreadable() -> dict[str, Path]:
    """Files of records that cannot be read, by the deployment's name."""
    return {name: path for name, (path, known) in _records().items() if known is None}


def _records() -> dict[str, tuple[Path, Known | None]]:
    return {path.stem: (path, _read(path)) for path in sorted(directory().glob("*.json"))}


def _read(path: Path) -> Known | None:
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
