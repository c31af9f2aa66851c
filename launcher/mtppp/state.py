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


def remember(cluster: Cluster, file: Path) -> None:
    """Record a deployment, before anything of it is started."""
    target = directory() / f"{cluster.name}.json"
    record = {"file": str(file.absolute()), "cluster": cluster.model_dump(mode="json")}
    temporary = target.with_suffix(f".{os.getpid()}")
    with _writing(target):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
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
    """All deployments remembered, by name. A record that cannot be read any more is left out."""
    found = {}
    for path in sorted(directory().glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            cluster = Cluster.model_validate(record["cluster"])
        except (OSError, ValueError, KeyError, ValidationError):
            continue
        found[cluster.name] = Known(cluster, Path(record["file"]))
    return found
