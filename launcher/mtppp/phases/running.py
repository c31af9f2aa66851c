"""Compare what runs already with the Plan: a second launch changes nothing that is as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each, on_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.status import DeploymentStatus, ask
from mtppp.phases.stop import stop_node
from mtppp.plan.differences import differences
from mtppp.plan.plan import NodePlan, Plan


class CompareWithRunning(WithoutTrace):
    """Nothing runs: go on. What runs is as planned and was checked: finished.

    What a launch left that did not come to its end is gone on with if everything of it is there.
    What is broken or hung is stopped and launched anew; if told to, also what is not as planned,
    or is wrong.
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
            step.note = f"as planned, {status.explanation}; nothing was changed"
            return
        if not changed and status.state in ("serving", "starting"):
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
        _stop(deployment, status)
        step.note = f"stopped: {changed[0] if changed else status.explanation}"


def _stop(deployment: Deployment, status: DeploymentStatus) -> None:
    if deployment.protected:
        raise MtpppError(
            f"{status.name} is protected, and would have to be stopped first: {status.explanation}",
            hint=f"to go ahead: --yes {status.name}",
        )
    on_each([deployment.head], lambda member: stop_node(*member))
    on_each(deployment.members[1:], lambda member: stop_node(*member))


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
