"""Compare what runs already with the Plan: a second launch changes nothing that is as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each, on_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.status import DeploymentStatus, ask
from mtppp.phases.stop import gpu_memory_held, stop_all_but_ray, stop_node
from mtppp.plan.build import RAY
from mtppp.plan.differences import differences
from mtppp.plan.plan import NodePlan, Plan


class CompareWithRunning(WithoutTrace):
    """Nothing runs: go on. What runs is as planned and was checked: finished.

    What a launch left that did not come to its end is gone on with if everything of it is there.
    What is broken or hung is stopped and launched anew; if told to, also what is not as planned,
    or is wrong. Where the file says so, only what is missing is launched anew: the server and its
    ranks, which live and die together, and Ray of nodes other than the first.
    """

    title = "running"

    def run(self, deployment: Deployment, step: Step) -> None:
        status = ask(deployment)
        if status.state == "stopped":
            step.note = "nothing yet"
            return
        changed = list(dict.fromkeys(_changes(deployment)))
        if changed and not deployment.restart:
            raise MtpppError(
                f"{status.name} runs already, but not as planned: {changed[0]}",
                details=changed[1:],
                hint="`--restart` stops it and launches it anew",
            )
        if not changed and status.state == "serving" and status.checked:
            deployment.finished = True
            opened = f"; open: {status.gate_why}" if status.gate_why else ""
            step.note = f"as planned, {status.explanation}{opened}; nothing was changed"
            return
        if not changed and status.state in ("serving", "gated", "starting"):
            deployment.adopted = True
            step.note = f"{status.explanation}; going on with a launch that did not end"
            return
        if not changed and status.state == "wrong" and not deployment.restart:
            raise MtpppError(
                f"{status.name} runs as planned, but {status.explanation}",
                hint="`--restart` stops it and launches it anew",
            )
        if status.state not in ("broken", "hung", "wrong") and not changed:
            raise MtpppError(f"{status.name}: {status.explanation}")
        note = f"stopped: {changed[0] if changed else status.explanation}"
        if deployment.cluster.recovery == "missing" and not changed:
            if whole := _why_whole(status):
                note += f"; everything is restarted: {whole}"
            else:
                deployment.living = _with_ray(status)
                note = f"{status.explanation}; brought back: {_brought_back(deployment)}"
        held = _stop(deployment, status)
        step.note = "; ".join([note, *held])


def _with_ray(status: DeploymentStatus) -> frozenset[int]:
    """Nodes on which Ray runs."""
    return frozenset(
        index for index, node in enumerate(status.nodes) if (node.processes or {}).get(RAY)
    )


def _why_whole(status: DeploymentStatus) -> str:
    """Why what is missing cannot be brought back alone; "" when it can."""
    if status.state != "broken":
        return "nothing of it is missing"
    if not status.checked:
        return "no launch had checked what is left"
    if 0 not in _with_ray(status):
        return f"the others' Ray depends on that of {status.nodes[0].host}"
    return ""


def _brought_back(deployment: Deployment) -> str:
    hosts = [
        node.host for index, node in enumerate(deployment.nodes) if index not in deployment.living
    ]
    return " and ".join(["the server", *([f"Ray on {', '.join(hosts)}"] if hosts else [])])


def _stop(deployment: Deployment, status: DeploymentStatus) -> list[str]:
    """What of the GPUs' memory is not free again: what is launched next would find it taken, and
    would note it as what was in use before."""
    if deployment.protected:
        raise MtpppError(
            f"{status.name} is protected, and would have to be stopped first: {status.explanation}",
            hint=f"to go ahead: --yes {status.name}",
        )

    held: dict[int, list[str]] = {}

    def stop(member: tuple[Node, NodePlan]) -> None:
        node, planned = member
        known = node.look(status.name, planned.index)
        (stop_all_but_ray if planned.index in deployment.living else stop_node)(*member)
        held[planned.index] = list(gpu_memory_held(node, known))

    on_each([deployment.head], stop)
    on_each(deployment.members[1:], stop)
    return [line for index in sorted(held) for line in held[index]]


def _changes(deployment: Deployment) -> Iterator[str]:
    """How the Plan differs from what some node was launched with."""
    held: dict[int, Mapping[str, str]] = {}

    def read(planned: NodePlan) -> None:
        node = deployment.nodes[planned.index]
        held[planned.index] = node.read(f"{planned.directory}/{PLAN_FILE}")

    look_at_each(deployment.plan.nodes, read)
    for index in sorted(held):
        for text in held[index].values():
            yield from map(str, differences(Plan.fields_of(text), deployment.plan.fields()))
