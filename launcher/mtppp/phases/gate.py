"""The gate of a deployment's server, which `mtppp_patches.gate` holds: looking at it, opening it.

It opens for one server process, the one that was looked at before it was verified: one that was
restarted meanwhile stays closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mtppp.engine.client import BadAnswer, EngineClient
from mtppp.errors import MtpppError
from mtppp.hosts.lock import operator
from mtppp.hosts.node import File, Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import look_at_each, on_each
from mtppp_patches.gate import OPEN_FILE

AT_OWN_RISK = "at your own risk"
BY_HAND = f"by hand, {AT_OWN_RISK}"

_DEADLINE = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Gate:
    """What the first node has of it.

    Attributes:
        directory: the run directory.
        key: that lets a request through; "" when there is none.
        instance: of the server process; "" when none has begun to listen.
        opened: who opened it for this process, when and why; None while it is closed.
    """

    directory: str
    key: str
    instance: str
    opened: Mapping[str, str] | None

    @classmethod
    def found(cls, known: Mapping[str, Any]) -> Gate:
        """Of what a node knows of the deployment."""
        gate = known["gate"]
        server, opened = gate["server"] or {}, gate["opened"] or {}
        instance = server.get("instance", "")
        for_it = instance and opened.get("instance") == instance
        return cls(known["directory"], gate["key"], instance, opened if for_it else None)

    @property
    def why(self) -> str:
        """Why it is open, by whom and since when; "" while it is closed."""
        if self.opened is None:
            return ""
        return f"{self.opened['why']} ({self.opened['by']} at {self.opened['at']})"


def look(deployment: Deployment) -> Gate:
    """Ask the first node, and let our own requests through from now on."""
    found: list[Gate] = []

    def ask(node: Node) -> None:
        found.append(Gate.found(node.look(deployment.cluster.name, 0)))

    look_at_each(deployment.nodes[:1], ask)
    deployment.gate_key = found[0].key
    return found[0]


def held(deployment: Deployment, endpoint: str) -> Gate:
    """The same, of a server that holds requests of others, as it must before it is verified.

    Raises:
        MtpppError: it lets everybody in.
    """
    gate = look(deployment)
    if gate.opened is None and lets_in(deployment, endpoint):
        raise MtpppError(
            f"{endpoint} lets everybody in, although nothing has opened it",
            hint="something else than vLLM's own API server answers there; verify.enabled: false"
            " launches without holding requests",
        )
    return gate


def open_gate(deployment: Deployment, gate: Gate, endpoint: str, why: str) -> None:
    """Open it for the server that `gate` was found of, and see that others are let in.

    Raises:
        MtpppError: they are not, since another server runs there now.
    """
    record = {
        "instance": gate.instance,
        "why": why,
        "by": operator(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    file = File(OPEN_FILE, json.dumps(record).encode())
    on_each(deployment.nodes[:1], lambda node: node.write(gate.directory, [file]))
    if not lets_in(deployment, endpoint):
        raise MtpppError(
            f"{endpoint} still holds requests: another server runs there than was looked at",
            hint=f"mtppp launch {deployment.file}",
        )


def lets_in(deployment: Deployment, endpoint: str) -> bool:
    """Whether the server answers those who have no key of the gate."""
    look_at_each([endpoint], deployment.way)
    with EngineClient(
        endpoint,
        timeout=_DEADLINE,
        headers=deployment.authorization,
        forwarder=deployment.way(endpoint).forwarder,
    ) as client:
        try:
            client.models()
        except BadAnswer as answer:
            return not answer.gated
    return True
