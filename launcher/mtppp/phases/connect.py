"""Reach every host."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each, with_hints


class Connect(WithoutTrace):
    title = "connect"

    def run(self, deployment: Deployment, step: Step) -> None:
        look_at_each(deployment.nodes, lambda node: node.transport.connect())
        step.note = ", ".join(node.host for node in deployment.nodes)


class ConnectToSome(WithoutTrace):
    """The same, going on without hosts that cannot be reached; one must be."""

    title = "connect"

    def run(self, deployment: Deployment, step: Step) -> None:
        def connect(index: int) -> None:
            try:
                deployment.nodes[index].transport.connect()
            except MtpppError as error:
                deployment.unreachable[index] = error

        look_at_each(range(len(deployment.nodes)), connect)
        if not deployment.reached:
            first, *others = (error for _, error in sorted(deployment.unreachable.items()))
            first.details = (*first.details, *with_hints(others, known=first.hint))
            raise first
        step.note = ", ".join(
            node.host + (" CANNOT BE REACHED" if index in deployment.unreachable else "")
            for index, node in enumerate(deployment.nodes)
        )
