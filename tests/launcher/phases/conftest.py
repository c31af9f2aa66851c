"""Deployments on this machine whose Ray and server are small scripts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from scripted import SLEEP, running

from mtppp.cluster import Cluster
from mtppp.console import Console, Step
from mtppp.hosts.facts import HostFacts
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.plan.review import Review


@pytest.fixture
def step() -> Step:
    return Step(Console(), "a step")


@pytest.fixture(name="free_port")
def a_free_port() -> int:
    return free_port()


@pytest.fixture
def deploy(
    make_cluster: Callable[..., Cluster],
    make_facts: Callable[..., HostFacts],
    make_review: Callable[..., Review],
    run_directory: str,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Deployment]]:
    """A planned deployment of two local nodes; its Ray sleeps, its server runs `server`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Deployment] = []
    name = run_directory.split("/")[-2]

    def make(server: str = SLEEP, **changes: Any) -> Deployment:
        nodes = [
            {"host": host, "address": f"127.0.0.{i}", "transport": "local", "gpus": 1}
            for i, host in enumerate("ab", 1)
        ]
        changes = {"name": name, "nodes": nodes, "serve": {"port": free_port}} | changes
        facts = [make_facts(uid=os.getuid(), path=os.environ["PATH"])] * 2
        reviewed = make_review(*facts, **changes)
        plan = reviewed.plan
        deployment = Deployment(
            cluster=make_cluster(**changes),
            file=Path("cluster.yaml"),
            nodes=[Node(LocalTransport(host), sys.executable) for host in "ab"],
        )
        deployment.reviewed = replace(
            reviewed,
            plan=replace(
                plan,
                nodes=tuple(
                    replace(node, plugins=f"{run_directory}-plugins", ray=running(node.ray, SLEEP))
                    for node in plan.nodes
                ),
                server=running(plan.server, server),
            ),
        )
        made.append(deployment)
        return deployment

    yield make
    for deployment in made:
        for node, planned in deployment.members:
            if not Path(planned.directory, "processes.json").exists():
                continue
            node.stop(planned.directory, grace={}, segments_file="none")
            shutil.rmtree(planned.ray_directory, ignore_errors=True)
