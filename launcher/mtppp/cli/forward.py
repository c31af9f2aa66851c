"""`mtppp forward`"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing

import click

from mtppp.cli.deployments import connectable, deployment_argument, resolve_launched
from mtppp.console import Console
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.forward import Forwarder
from mtppp.hosts.transport import Stream

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT = 30.0


@click.command(name="forward")
@deployment_argument
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port on this machine; by default the one that the server has on its node.",
)
def command(deployment: str | None, port: int | None) -> None:
    """Make the endpoint reachable at 127.0.0.1, through the ssh connection, until Ctrl-C.

    For when the serving port can be reached from the nodes only. Whoever is logged in on this
    machine can use it, as with `ssh -L`.
    """
    console = Console()
    target = connectable(resolve_launched(deployment))
    node, port_there = target.cluster.nodes[0], target.cluster.serve.port
    transport = target.nodes[0].transport

    def connect() -> Stream:
        return transport.open_stream(node.address, port_there, timeout=_CONNECT_TIMEOUT)

    with closing(target):
        try:
            connect().close()
        except MtpppError as error:
            error.hint = error.hint or f"`mtppp status {target.cluster.name}` says what runs"
            raise
        with closing(Forwarder(_listen(port or port_there), connect, on_failure=console.error)):
            console.say(
                f"http://{LOOPBACK}:{port or port_there}/v1 leads to {target.cluster.name} on"
                f" {node.host}, until Ctrl-C"
            )
            threading.Event().wait()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {LOOPBACK} port {port}: {os.strerror(error.errno or 0)}",
            hint="give another with --port",
        ) from None
