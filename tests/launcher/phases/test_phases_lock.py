"""Two who work on one deployment: the second is told, and changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mtppp.console import Console, Step
from mtppp.errors import Locked, MtpppError
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.lock import TakeLocks
from mtppp.phases.phase import WithoutTrace, run_phases

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def another(deployment: Deployment) -> Deployment:
    """The same deployment, of somebody else."""
    nodes = [Node(LocalTransport(node.host), sys.executable) for node in deployment.nodes]
    return replace(deployment, nodes=nodes)


def outcomes(name: str) -> list[str]:
    log = Path(f"/var/tmp/mtppp-{os.getuid()}/audit.log").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    return sorted(
        f"{line['what']} {line['node']} {line['outcome']}"
        for line in lines
        if line["deployment"] == name
    )


class Fails(WithoutTrace):
    title = "fails"

    def run(self, deployment: Deployment, step: Step) -> None:
        raise MtpppError("it failed")


def test_the_second_gets_no_lock_at_all(deploy: Deploy) -> None:
    deployment = without_gpus(deploy)
    other = another(deployment)
    name = deployment.cluster.name

    class Second(WithoutTrace):
        title = "second"

        def run(self, deployment: Deployment, step: Step) -> None:
            with pytest.raises(Locked, match=f"^a: {name} is being launched by "):
                TakeLocks("stop").run(other, step)

    run_phases([TakeLocks("launch"), Second()], deployment, Console())
    assert outcomes(name) == [
        "launch 0 begun",
        "launch 0 done",
        "launch 1 begun",
        "launch 1 done",
    ]
    run_phases([TakeLocks("stop")], other, Console())


def test_two_launches_do_not_take_the_same_gpus(deploy: Deploy, step: Step) -> None:
    first, second = deploy(), deploy()
    second.cluster = second.cluster.model_copy(update={"name": f"{first.cluster.name}-b"})
    with holding_gpus():
        TakeLocks("launch").run(first, step)
        with pytest.raises(Locked) as raised:
            TakeLocks("launch").run(second, step)
        assert raised.value.message.startswith(
            f"a: its GPUs are about to be taken: {first.cluster.name} is being launched by "
        )
        run_phases([TakeLocks("stop")], second, Console())  # takes none
        for node in first.nodes:
            node.unlock("done")
        TakeLocks("launch").run(second, step)
        for node in second.nodes:
            node.unlock("done")


@contextmanager
def holding_gpus() -> Iterator[None]:
    """Tests on this machine that claim its GPUs wait for each other."""
    with Path(tempfile.gettempdir(), "mtppp-tests-with-gpus").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def without_gpus(deploy: Deploy) -> Deployment:
    runtime = {"vllm": "0.32.0", "python": "/opt/vllm/bin/python", "device": "cpu"}
    return deploy(runtime=runtime)


def test_how_it_ended_is_kept_on_every_node(deploy: Deploy) -> None:
    deployment = without_gpus(deploy)
    with pytest.raises(MtpppError, match="it failed"):
        run_phases([TakeLocks("launch"), Fails()], deployment, Console())
    assert outcomes(deployment.cluster.name) == [
        "launch 0 begun",
        "launch 0 failed: it failed",
        "launch 1 begun",
        "launch 1 failed: it failed",
    ]
