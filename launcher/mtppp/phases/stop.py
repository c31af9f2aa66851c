"""End what a deployment started on its nodes, and only that; and prove that it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtppp import state
from mtppp.console import Step
from mtppp.errors import Inconclusive, MtpppError, RemoteCommandFailed
from mtppp.hosts.node import Node
from mtppp.phases.connect import ConnectToSome
from mtppp.phases.deployment import Deployment
from mtppp.phases.lock import TakeLocks
from mtppp.phases.phase import Phase, WithoutTrace, on_each
from mtppp.phases.run_directory import LAUNCH_FILE, LAUNCH_ONLY, SERVER_ONLY, SHARED_MEMORY_FILE
from mtppp.plan import directories
from mtppp.plan.build import RAY, SERVER
from mtppp.plan.plan import NodePlan

GRACE = {SERVER: 15.0}
"""Seconds that recorded processes have to end by themselves, by role. The server ends its engine
and that its workers; Ray's processes are killed: nothing that they would save is kept."""
GPU_MEMORY_TOLERANCE = 256 * 2**20
"""Bytes by which a GPU's memory in use may be above what it was: drivers keep some of their own."""
GPU_MEMORY_PATIENCE = 30.0
"""Seconds for a driver to take back the memory of processes that were killed."""
_POLL = 1.0


class StopNodes(WithoutTrace):
    """The first node first: its server tells its workers to end. Needs no Plan and no record but
    what the nodes have: the run directory follows from the user, the name and the node's index."""

    title = "stop"

    def run(self, deployment: Deployment, step: Step) -> None:
        name = deployment.cluster.name
        ended: dict[int, int] = {}
        unproven: dict[int, list[str]] = {}

        def stop(index: int) -> None:
            node = deployment.nodes[index]
            known = node.look(name, index)
            directory = known["directory"]
            ended[index] = _stop(node, directory)
            ray_directory = directories.ray_directory(known["uid"], name, index)
            node.clear(directory, ray_directory, [n for n in LAUNCH_ONLY if n != LAUNCH_FILE])
            unproven[index] = list(_not_proven(node, index, known))
            # It has what the end is proven by: as long as that is in doubt, for the next stop.
            if not unproven[index]:
                node.clear(directory, None, [LAUNCH_FILE])

        # Others are stopped also when one cannot be; the first one's error is the one to tell.
        failed: MtpppError | None = None
        first, *others = deployment.reached
        for indices in ([first], others):
            try:
                on_each(indices, stop)
            except MtpppError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        doubts = [line for index in sorted(unproven) for line in unproven[index]]
        if deployment.unreachable or doubts:
            state.remember(deployment.cluster, deployment.file)
        if deployment.unreachable:
            raise _unfinished(deployment, doubts)
        step.note = (
            f"{name} ended on {', '.join(node.host for node in deployment.nodes)}"
            if sum(ended.values())
            else f"{name} was not running"
        )
        if doubts:
            raise Inconclusive(
                f"{name} has ended, but not everything is proven to be as before",
                details=doubts,
                hint="no process of it is left; look at what is named, then"
                f" `mtppp stop {name}` looks again",
            )
        state.forget(name)


STOP: tuple[Phase, ...] = (ConnectToSome(), TakeLocks("stop"), StopNodes())


def _unfinished(deployment: Deployment, doubts: Sequence[str]) -> MtpppError:
    name = deployment.cluster.name
    stopped = ", ".join(deployment.nodes[index].host for index in deployment.reached)
    unreachable = [deployment.nodes[index].host for index in sorted(deployment.unreachable)]
    return MtpppError(
        f"{name} ended on {stopped}; {', '.join(unreachable)} could not be reached,"
        " and what runs there still does",
        details=[*(e.message for _, e in sorted(deployment.unreachable.items())), *doubts],
        hint=f"`mtppp stop {name}` once more when it can be reached ends the rest",
    )


def stop_node(node: Node, planned: NodePlan) -> None:
    """End a node's processes, unlink their shared memory, remove what only they needed.

    Raises:
        RemoteCommandFailed: a process would not end.
    """
    _stop(node, planned.directory)
    node.clear(planned.directory, planned.ray_directory, LAUNCH_ONLY)


def stop_all_but_ray(node: Node, planned: NodePlan) -> None:
    """End the server and the ranks on a node, and nothing of Ray.

    Raises:
        RemoteCommandFailed: a process would not end.
    """
    _stop(node, planned.directory, keep=(RAY,))
    node.clear(planned.directory, None, SERVER_ONLY)


def _stop(node: Node, directory: str, *, keep: Sequence[str] = ()) -> int:
    """End what runs for a run directory; the number of processes that ran."""
    ended = node.stop(directory, grace=GRACE, segments_file=SHARED_MEMORY_FILE, keep=keep)
    if ended["left"]:
        raise RemoteCommandFailed(
            node.host,
            f"{len(ended['left'])} processes would not end",
            hint="they may hang in the kernel or belong to another user; look at them there",
            details=[f"{process['pid']} {process['command']}" for process in ended["left"]],
        )
    return int(ended["running"])


def _not_proven(node: Node, index: int, known: Mapping[str, Any]) -> Iterator[str]:
    """What of a node, once its processes have ended, is not as it was before the launch.

    Args:
        known: what it told of the deployment before that was stopped.
    """
    if not (known["launch"] or known["recorded"] or known["marked"]):
        return
    plan = known["plan"] or {}
    if len(plan.get("nodes", ())) > index:
        planned = plan["nodes"][index]
        for port, holder in node.listeners(planned["address"], _ports(plan, index)):
            yield f"{node.host}: port {port} is still taken ({holder})"
    yield from gpu_memory_held(node, known)


def _ports(plan: Mapping[str, Any], index: int) -> list[int]:
    """The ports that the processes of a node listened on."""
    ports = dict(plan["nodes"][index]["ports"])
    for unused in ("first_worker", "last_worker", "dashboard"):
        ports.pop(unused, None)
    serving = [int(plan["endpoint"].rpartition(":")[2])] if index == 0 else []
    return [*ports.values(), *serving]


def gpu_memory_held(node: Node, known: Mapping[str, Any]) -> Iterator[str]:
    """GPUs of which more memory is in use than before a launch. It may be a while on its way.

    Args:
        known: what the node told of the deployment while the launch was noted there.
    """
    before = (known["launch"] or {}).get("gpu_memory")
    if before is None:
        return
    deadline = time.monotonic() + GPU_MEMORY_PATIENCE
    while True:
        now = node.gpu_memory()
        if now["used"] is None:
            yield f"{node.host}: memory of its GPUs: {now['reason'] or 'nvidia-smi is gone'}"
            return
        more = {
            gpu: used - level
            for gpu, (used, level) in enumerate(zip(now["used"], before, strict=False))
            if used > level + GPU_MEMORY_TOLERANCE
        }
        if not more:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL)
    for gpu, extra in more.items():
        yield (
            f"{node.host}: GPU {gpu} holds {extra / 2**30:.1f} GiB more than before the launch;"
            " `nvidia-smi` there says whose"
        )
