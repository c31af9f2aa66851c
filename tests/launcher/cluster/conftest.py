"""A small valid cluster file, one section a line, and what `load` says of variations on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp.cluster import Cluster, load
from mtppp.errors import ConfigurationError

VALID = {
    "name": "name: demo",
    "model": "model: {id: org/model}",
    "nodes": "nodes: [{host: a, address: 10.0.0.1, gpus: 8}, {host: 10.0.0.2, gpus: 8}]",
    "runtime": 'runtime: {vllm: "0.32.0", python: /opt/vllm/bin/python}',
}


@pytest.fixture
def cluster_text() -> Callable[..., str]:
    """The valid file with `sections` in place of its lines 1 to 4 and `extra` after them."""

    def text(*extra: str, **sections: str) -> str:
        return "\n".join([*(VALID | sections).values(), *extra]) + "\n"

    return text


@pytest.fixture
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, so that messages name the file as `cluster.yaml`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def problems(in_directory: Path) -> Callable[[str | bytes], list[str]]:
    """What is wrong with a text as cluster.yaml: the lines of the error, or none."""

    def problems_of(content: str | bytes) -> list[str]:
        path = Path("cluster.yaml")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        try:
            load(path)
        except ConfigurationError as error:
            return list(error.details) or [error.message]
        return []

    return problems_of


@pytest.fixture
def loaded(in_directory: Path) -> Callable[[str], Cluster]:
    """A text as a valid cluster."""

    def cluster_of(text: str) -> Cluster:
        path = Path("cluster.yaml")
        path.write_text(text, encoding="utf-8")
        return load(path).cluster

    return cluster_of
