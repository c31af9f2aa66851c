"""Clusters, host facts and Plans for tests of the launcher."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from mtppp.cluster import Cluster, load
from mtppp.hosts.facts import HostFacts
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.plan.plan import Plan
from mtppp.plan.review import Review, review

DEMO_MODEL = Path(__file__).parents[2] / "cluster_configs" / "models" / "demo-glm4-moe"

CLUSTER: dict[str, Any] = {
    "name": "demo",
    "model": {"id": "/models/demo", "served_name": "demo"},
    "nodes": [
        {"host": "a", "address": "10.0.0.1", "gpus": 1},
        {"host": "b", "address": "10.0.0.2", "gpus": 1},
    ],
    "runtime": {"vllm": "0.32.0", "python": "/opt/vllm/bin/python"},
    "parallel": {"pipeline": 2},
    "speculative": {"tokens": 3},
}


@pytest.fixture
def make_cluster(tmp_path: Path) -> Callable[..., Cluster]:
    """The cluster of a file with these top-level keys changed; None takes one out."""

    def make(**changes: Any) -> Cluster:
        content = {key: value for key, value in (CLUSTER | changes).items() if value is not None}
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return load(file).cluster

    return make


@pytest.fixture
def make_facts() -> Callable[..., HostFacts]:
    """Facts of a host as its agent would tell them, with these changed."""

    def make(**changes: Any) -> HostFacts:
        answer = {
            "hostname": "host",
            "user": "ubuntu",
            "uid": 1000,
            "path": "/usr/bin:/bin",
            "python": "/opt/vllm/bin/python",
            "python_version": "3.11.7",
            "versions": {"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0"},
            "interface": "eth0",
            "addresses": [["lo", "127.0.0.1"], ["eth0", "10.0.0.1"]],
            "gpus": [],
            "rdma": [],
            "limits": {"nofile": 1 << 20, "memlock": None},
            "deployments": [],
            "ports_taken": [],
            "ports_forbidden": [],
            "shm_bytes": 2**30,
            "model_path": "/models/demo",
            "model_config": (DEMO_MODEL / "config.json").read_text(),
        }
        return HostFacts.from_answer(answer | changes)

    return make


@pytest.fixture(scope="session")
def demo_model() -> ModelFacts:
    return read_facts(find_config(str(DEMO_MODEL)).values)


@pytest.fixture
def make_review(
    make_cluster: Callable[..., Cluster],
    make_facts: Callable[..., HostFacts],
    demo_model: ModelFacts,
) -> Callable[..., Review]:
    """The judged Plan of `make_cluster(**changes)`; the hosts are all alike but for `facts`."""

    def make(*facts: HostFacts, **changes: Any) -> Review:
        cluster = make_cluster(**changes)
        return review(
            cluster,
            model=demo_model,
            bundle="0123456789abcdef",
            facts=facts or [make_facts()] * len(cluster.nodes),
        )

    return make


@pytest.fixture
def make_plan(make_review: Callable[..., Review]) -> Callable[..., Plan]:
    """The Plan of `make_review`."""

    def make(*facts: HostFacts, **changes: Any) -> Plan:
        return make_review(*facts, **changes).plan

    return make


@pytest.fixture
def run_directory() -> Iterator[str]:
    """A path for a run directory of a test's own, where the agent lets one be; not made yet."""
    deployment = Path(f"/var/tmp/mtppp-{os.getuid()}/test-{uuid4().hex[:12]}")
    yield f"{deployment}/0"
    shutil.rmtree(deployment, ignore_errors=True)
    for lock in deployment.parent.glob(f"locks/{deployment.name}.*"):
        lock.unlink()


@pytest.fixture
def demo_directory() -> Path:
    """A model's directory, on this machine."""
    return DEMO_MODEL
