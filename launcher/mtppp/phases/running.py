"""Compare what runs already with the Plan: a second launch changes nothing that is as planned."""

from __future__ import annotations

from collections.abc import Iterator

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.status import ask
from mtppp.phases.stop import stop_node
from mtppp.plan.differences import differences
from mtppp.plan.plan import Plan


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
        stop_node(*deployment.head)
        on_each(deployment.members[1:], lambda member: stop_node(*member))
        step.note = f"stopped: {reason}"


def _changes(deployment: Deployment) -> Iterator[str]:
    """How the Plan differs from what some node was launched with."""
    for node, planned in deployment.members:
        held = node.read(f"{planned.directory}/{PLAN_FILE}")
        for text in held.values():
            yield from map(str, differences(Plan.fields_of(text), deployment.plan.fields()))
