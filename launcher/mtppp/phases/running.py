"""Compare what runs already with the Plan: a second launch changes nothing that is as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each, on_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.status import ask
from mtppp.phases.stop import stop_node
from mtppp.plan.differences import differences
from mtppp.plan.plan import NodePlan, Plan


class CompareWithRunning(WithoutTrace):
    """Nothing runs: go on. What runs is as planned: finished. Otherwise: restart if told to."""

    title = "running"

    def run(self, deployment: Deployment, step: Step) -> None:
        if not deployment.running:
            step.note = "nothing yet"
            return
        changed = list(dict.fromkeys(_changes(deployment)))
        status = ask(deployment)
        if not changed and status.state == "serving":
            deployment.finished = True
            step.note = f"as planned, {status.explanation}; nothing was changed"
            return
        reason = changed[0] if changed else status.explanation
        if not deployment.restart:
            raise MtpppError(
                f"{deployment.cluster.name} runs already, but not as planned: {reason}",
                details=changed[1:],
                hint="`--restart` stops it and launches it anew",
            )
        on_each([deployment.head], lambda member: stop_node(*member))
        on_each(deployment.members[1:], lambda member: stop_node(*member))
        step.note = f"stopped: {reason}"


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
