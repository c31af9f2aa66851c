"""Start Ray on every node, the first node's first, and reserve every rank's GPU."""

from __future__ import annotations

import json
import threading
from functools import partial

from mtppp.console import Step
from mtppp.errors import MtpppError, RemoteCommandFailed
from mtppp.hosts.node import Ended, Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.logs import telling_lines
from mtppp.phases.phase import Starts, WithoutTrace, look_at_each, on_each
from mtppp.phases.serve import check_alive
from mtppp.phases.stop import stop_node
from mtppp.plan.build import PLACEMENT_TIMEOUT
from mtppp.plan.plan import NodePlan

_LOOK_AT_NODES = 2.0  # seconds between two looks at processes and logs
_STARTED = "Ray runtime started"
_MARGIN = 60.0  # seconds for python and Ray's client to start, on a file system that may be slow


class StartRay(Starts):
    """Ray's head on the first node, and the others'; they join in any order."""

    title = "ray"

    def run(self, deployment: Deployment, step: Step) -> None:
        def start(member: tuple[Node, NodePlan]) -> None:
            node, planned = member
            node.start(
                role=planned.ray.role,
                argv=planned.ray.argv,
                env=deployment.environment(planned.ray),
                directory=planned.directory,
                log=planned.ray.log,
                logs=f"{planned.ray_directory}/session_2*/logs/worker-*[!1]",
            )

        # A worker's raylet asks for the head's GCS again and again, so none needs to wait.
        missing = [
            member for member in deployment.members if member[1].index not in deployment.living
        ]
        on_each(missing, start)
        started = f"{len(missing)} nodes" if missing else "lives on"
        step.note = f"{started}, head {deployment.plan.head.address}"

    def clean_up(self, deployment: Deployment) -> None:
        on_each(deployment.members, lambda member: stop_node(*member))


class Place(Starts, WithoutTrace):
    """One bundle per rank, pinned to its node, in a placement group of our own."""

    title = "placement"

    def run(self, deployment: Deployment, step: Step) -> None:
        node, planned = deployment.head
        command = deployment.plan.placement
        answers: list[Ended | MtpppError] = []

        def place() -> None:
            try:
                ended = node.run(
                    command.argv,
                    env=deployment.environment(command),
                    directory=planned.directory,
                    timeout=PLACEMENT_TIMEOUT + _MARGIN,
                )
                answers.append(ended)
            except MtpppError as error:
                answers.append(error)

        # Interrupted, it is not waited for: it ends with the other processes of the deployment.
        placing = threading.Thread(target=place, daemon=True)
        placing.start()
        while not answers:
            placing.join(_LOOK_AT_NODES)
            if not answers:
                look_at_each(deployment.members, partial(check_alive, deployment))
                step.progress(_joining(deployment))
        [ended] = answers
        if isinstance(ended, MtpppError):
            raise ended
        if ended.status != 0:
            raise RemoteCommandFailed(
                node.host,
                f"the ranks could not be placed: {_problem(ended)}",
                hint="see the Ray logs below, and that the nodes reach each other's address",
                details=[
                    *telling_lines(ended.stderr, 6),
                    *(line for member in deployment.members for line in _ray_log(*member)),
                ],
            )
        step.note = ", ".join(
            f"stage {stage.index} on "
            + "+".join(deployment.plan.nodes[index].host for index in stage.nodes)
            for stage in deployment.plan.stages
        )


def _joining(deployment: Deployment) -> str:
    """Which nodes' Ray has started, by their logs."""
    started: dict[str, bool] = {}

    def look(member: tuple[Node, NodePlan]) -> None:
        node, planned = member
        logs = node.read(f"{planned.directory}/{planned.ray.log}", limit=1 << 14)
        started[node.host] = any(_STARTED in text for text in logs.values())

    look_at_each(deployment.members, look)
    missing = [node.host for node in deployment.nodes if not started[node.host]]
    return f"waiting for Ray on {', '.join(missing)}" if missing else "all nodes have joined"


def _problem(ended: Ended) -> str:
    if ended.status is None:
        return f"Ray gave no answer in {PLACEMENT_TIMEOUT + _MARGIN:g} s"
    try:
        return str(json.loads(ended.stdout.strip().rpartition("\n")[2])["problem"])
    except (ValueError, KeyError, TypeError):
        return "the command that reserves their GPUs failed"


def _ray_log(node: Node, planned: NodePlan) -> list[str]:
    logs = node.read(f"{planned.directory}/{planned.ray.log}", limit=1 << 16)
    return [f"{node.host}: {line}" for text in logs.values() for line in telling_lines(text, 4)]
