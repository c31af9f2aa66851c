"""`mtppp stop cluster.yaml`"""

from __future__ import annotations

import click

from mtppp.cli.deployments import (
    confirm,
    connectable,
    deployment_argument,
    resolve_launched,
    working_on,
)
from mtppp.console import Console
from mtppp.phases.phase import run_phases
from mtppp.phases.stop import STOP


@click.command(name="stop")
@deployment_argument
@click.option("--yes", metavar="NAME", help="The name that a protected deployment wants.")
def command(deployment: str | None, yes: str | None) -> None:
    """End a deployment (by default that of ./cluster.yaml, else the only one known).

    Ends exactly the processes that `mtppp launch` started on its nodes and their descendants,
    with their shared memory. Another Ray or vLLM on the same hosts is left alone. Logs stay. What
    runs on a node that cannot be reached is ended by stopping once more.

    Exit status 1 when a node could not be reached, 3 when a port or a GPU's memory is not proven
    to be free again.
    """
    console = Console()
    known = resolve_launched(deployment)
    confirm(known, yes)
    target = connectable(known)
    with working_on(target, console):
        run_phases(STOP, target, console)
