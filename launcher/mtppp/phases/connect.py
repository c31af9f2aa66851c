"""Reach every host."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, look_at_each


class Connect(WithoutTrace):
    title = "connect"

    def run(self, deployment: Deployment, step: Step) -> None:
        look_at_each(deployment.nodes, lambda node: node.transport.connect())
        step.note = ", ".join(node.host for node in deployment.nodes)
