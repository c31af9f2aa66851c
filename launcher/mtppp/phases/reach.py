"""How HTTP gets from the operator to the server on the first node."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from urllib.parse import urlsplit

from mtppp.cluster import Node
from mtppp.engine.client import BadAnswer, EngineClient, EngineError
from mtppp.errors import ConnectFailed, ForwardingProhibited
from mtppp.hosts.forward import PrivateForwarder
from mtppp.hosts.transport import Transport

_CONNECT_TIMEOUT = 30.0
_LOOK_TIMEOUT = 4.0
_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True)
class Way:
    """A way to the server.

    Attributes:
        through: the host through whose ssh connection it leads; "" when it is a direct one.
        forwarder: carries connections through; None when they are direct.
    """

    through: str
    forwarder: PrivateForwarder | None

    def __str__(self) -> str:
        return f"through ssh to {self.through}" if self.through else "directly"

    def close(self) -> None:
        if self.forwarder is not None:
            self.forwarder.close()


def find_way(node: Node, transport: Transport, endpoint: str) -> Way:
    """Through the ssh connection to the first node, unless its sshd does not allow that.

    Not directly first: an address of the cluster's network may be another machine's on the
    operator's, and a server that is not up yet looks like one that a firewall hides.

    Raises:
        HostError: the host cannot be talked to.
    """
    if node.transport == "local":
        return Way("", None)
    transport.connect()
    url = urlsplit(endpoint)
    address, port = url.hostname or "", url.port or 80
    try:
        transport.open_stream(address, port, timeout=_CONNECT_TIMEOUT).close()
    except ForwardingProhibited:
        return Way("", None)
    except ConnectFailed:
        pass  # nothing listens yet
    return Way(
        node.host,
        PrivateForwarder(
            lambda: transport.open_stream(address, port, timeout=_CONNECT_TIMEOUT),
        ),
    )


def reachable_from_here(endpoint: str, served_name: str) -> bool:
    """Whether a client on the operator's machine finds this model at the endpoint."""
    with contextlib.suppress(EngineError), EngineClient(endpoint, timeout=_LOOK_TIMEOUT) as client:
        try:
            return served_name in client.models()
        except BadAnswer as answer:
            # It asks for a key, as vLLM does, or holds requests, as mtppp has it do.
            return answer.status == _UNAUTHORIZED or answer.gated
    return False
