"""Take the deployment's lock on every node, so that nobody else works on it meanwhile."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.hosts.lock import Holder
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each


class TakeLocks(WithoutTrace):
    """The first node's first: of two who begin at once, one gets no lock at all.

    `run_phases` gives them back.
    """

    title = "lock"

    def __init__(self, what: str) -> None:
        self._what = what

    def run(self, deployment: Deployment, step: Step) -> None:
        holder = Holder.here(self._what, deployment.cluster.name)
        nodes = deployment.nodes
        first, *others = deployment.reached
        on_each([first], lambda index: nodes[index].lock(index, holder))
        on_each(others, lambda index: nodes[index].lock(index, holder))
        step.note = "nobody else is at work on it"
