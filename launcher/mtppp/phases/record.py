"""Note on the first node that a launch came to its end: the next one need not check again."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from mtppp.console import Step
from mtppp.hosts.lock import operator
from mtppp.hosts.node import File, Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each
from mtppp.phases.run_directory import CHECKED_FILE
from mtppp.plan.plan import NodePlan


class Record(WithoutTrace):
    title = "record"

    def run(self, deployment: Deployment, step: Step) -> None:
        record = {"by": operator(), "at": datetime.now(UTC).isoformat(timespec="seconds")}

        def write(member: tuple[Node, NodePlan]) -> None:
            node, planned = member
            node.write(planned.directory, [File(CHECKED_FILE, json.dumps(record).encode())])

        on_each([deployment.head], write)
        node, planned = deployment.head
        step.note = f"{node.host}:{planned.directory}"
