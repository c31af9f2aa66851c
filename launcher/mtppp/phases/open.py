"""Open a deployment's gate by hand."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.errors import MtpppError
from mtppp.phases.connect import Connect
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import BY_HAND, look, open_gate
from mtppp.phases.lock import TakeLocks
from mtppp.phases.phase import Phase, WithoutTrace
from mtppp.phases.status import ask


class OpenByHand(WithoutTrace):
    """Of a deployment that is gated; one that is open is left alone."""

    title = "open"

    def run(self, deployment: Deployment, step: Step) -> None:
        gate = look(deployment)
        status = ask(deployment)
        if status.gate == "open":
            step.note = f"it is open: {status.gate_why}"
            return
        if status.state != "gated":
            raise MtpppError(
                f"{status.name} is {status.state}: {status.explanation}",
                hint="only one that serves, and holds requests, can be opened",
            )
        open_gate(deployment, gate, status.endpoint, BY_HAND)
        step.note = f"{status.endpoint}/v1 serves everybody, {BY_HAND}"


OPEN: tuple[Phase, ...] = (Connect(), TakeLocks("open"), OpenByHand())
