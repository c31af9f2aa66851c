"""Compare what runs already with the Plan: a second launch changes nothing that is as planned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each
from mtppp.phases.run_directory import PLAN_FILE
from mtppp.phases.status import ask
from mtppp.phases.stop import stop_node
from mtppp.plan.plan import Plan


class CompareWithRunning(WithoutTrace):
    """Nothing runs: go on. What runs is as planned: finished. Otherwise: restart if told to."""

    title = "running"

    def run(self, deployment: Deployment, step: Step) -> None:
        if not deployment.running:
            step.note = "nothing yet"
            return
        changed = sorted(set(_changes(deployment)))
        status = ask(deployment)
        if not changed and status.state == "serving":
            deployment.finished = True
            step.note = f"as planned, {status.explanation}; nothing was changed"
            return
        reason = f"differs in {', '.join(changed)}" if changed else status.explanation
        if not deployment.restart:
            raise MtpppError(
                f"{deployment.cluster.name} runs already, but not as planned: {reason}",
                hint="`--restart` stops it and launches it anew",
            )
        stop_node(*deployment.head)
        on_each(deployment.members[1:], lambda member: stop_node(*member))
        step.note = f"stopped: {reason}"


def _changes(deployment: Deployment) -> Iterator[str]:
    """Names of the Plan's fields that differ from what some node was launched with."""
    for node, planned in deployment.members:
        held = node.read(f"{planned.directory}/{PLAN_FILE}")
        for text in held.values():
            yield from changed_fields(Plan.fields_of(text), json.loads(deployment.plan.to_json()))


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of the fields whose values differ between two Plans, as JSON."""
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
