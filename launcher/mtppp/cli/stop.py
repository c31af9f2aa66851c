"""`mtppp stop cluster.yaml`"""

from __future__ import annotations

import click

from mtppp.cli.deployments import connectable, deployment_argument, resolve, working_on
from mtppp.console import Console
from mtppp.phases.phase import run_phases
from mtppp.phases.stop import STOP


@click.command(name="stop")
@deployment_argument
def command(deployment: str | None) -> None:
    """End a deployment (by default that of ./cluster.yaml, else the only one known).

    Ends exactly the processes that `mtppp launch` started on its nodes and their descendants,
    with their shared memory. Another Ray or vLLM on the same hosts is left alone. Logs stay.
    """
    console = Console()
    target = connectable(resolve(deployment))
    with working_on(target, console):
        run_phases(STOP, target, console)
