"""End what a deployment started on its nodes, and only that."""

from __future__ import annotations

from mtppp import state
from mtppp.console import Step
from mtppp.errors import MtpppError, RemoteCommandFailed
from mtppp.hosts.node import Node
from mtppp.phases.connect import Connect
from mtppp.phases.deployment import Deployment
from mtppp.phases.lock import TakeLocks
from mtppp.phases.phase import Phase, WithoutTrace, on_each
from mtppp.phases.run_directory import LAUNCH_ONLY, SHARED_MEMORY_FILE
from mtppp.plan import directories
from mtppp.plan.build import SERVER
from mtppp.plan.plan import NodePlan

GRACE = {SERVER: 15.0}
"""Seconds that recorded processes have to end by themselves, by role. The server ends its engine
and that its workers; Ray's processes are killed: nothing that they would save is kept."""


class StopNodes(WithoutTrace):
    """The first node first: its server tells its workers to end. Needs no Plan and no record but
    what the nodes have: the run directory follows from the user, the name and the node's index."""

    title = "stop"

    def run(self, deployment: Deployment, step: Step) -> None:
        name = deployment.cluster.name
        ended: dict[int, int] = {}

        def stop(index: int) -> None:
            node = deployment.nodes[index]
            uid = node.uid()
            ended[index] = stop_directory(
                node,
                directories.run_directory(uid, name, index),
                directories.ray_directory(uid, name, index),
            )

        # Others are stopped also when the first node cannot be; its error is the one to tell.
        failed: MtpppError | None = None
        try:
            on_each([0], stop)
        except MtpppError as error:
            failed = error
        try:
            on_each(range(1, len(deployment.nodes)), stop)
        except MtpppError as error:
            failed = failed or error
        if failed is not None:
            raise failed
        state.forget(name)
        step.note = (
            f"{name} ended on {', '.join(node.host for node in deployment.nodes)}"
            if sum(ended.values())
            else f"{name} was not running"
        )


STOP: tuple[Phase, ...] = (Connect(), TakeLocks("stop"), StopNodes())


def stop_node(node: Node, planned: NodePlan) -> None:
    """End a node's processes, unlink their shared memory, remove what only they needed.

    Raises:
        RemoteCommandFailed: a process would not end.
    """
    stop_directory(node, planned.directory, planned.ray_directory)


def stop_directory(node: Node, directory: str, ray_directory: str) -> int:
    """The same for a run directory; the number of processes that ran."""
    ended = node.stop(directory, grace=GRACE, segments_file=SHARED_MEMORY_FILE)
    if ended["left"]:
        raise RemoteCommandFailed(
            node.host,
            f"{len(ended['left'])} processes would not end",
            hint="they may hang in the kernel or belong to another user; look at them there",
            details=[f"{process['pid']} {process['command']}" for process in ended["left"]],
        )
    node.clear(directory, ray_directory, LAUNCH_ONLY)
    return int(ended["running"])
