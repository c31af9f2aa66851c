"""End what a deployment started on a node, and only that."""

from __future__ import annotations

import json

from mtppp.errors import RemoteCommandFailed
from mtppp.hosts.node import Node
from mtppp.phases.ship import LAUNCH_ONLY
from mtppp.plan.plan import NodePlan

GRACE = 15.0
"""Seconds that a recorded process has to end by itself before it is killed."""
SHARED_MEMORY_FILE = "shared-memory.json"
"""Segments in /dev/shm that the deployment had mapped when it became ready."""


def stop_node(node: Node, planned: NodePlan) -> None:
    """End a node's processes, unlink their shared memory, remove what only they needed.

    Raises:
        RemoteCommandFailed: a process would not end.
    """
    stop_directory(node, planned.directory, planned.ray_directory)


def stop_directory(node: Node, directory: str, ray_directory: str) -> int:
    """The same for a run directory; the number of processes that had been recorded."""
    known = node.read(f"{directory}/{SHARED_MEMORY_FILE}")
    segments = [path for text in known.values() for path in json.loads(text)]
    recorded = len(node.processes(directory)["recorded"])
    ended = node.stop(directory, grace=GRACE, shared_memory=segments)
    if ended["left"]:
        raise RemoteCommandFailed(
            node.host,
            f"{len(ended['left'])} processes would not end",
            hint="they may hang in the kernel or belong to another user; look at them there",
            details=[f"{process['pid']} {process['command']}" for process in ended["left"]],
        )
    node.clear(directory, ray_directory, [*LAUNCH_ONLY, SHARED_MEMORY_FILE])
    return recorded
