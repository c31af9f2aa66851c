"""`mtppp stop cluster.yaml`"""

from __future__ import annotations

from pathlib import Path

import click

from mtppp.cli.deployments import from_file
from mtppp.console import Console
from mtppp.phases.phase import run_phases
from mtppp.phases.stop import STOP


@click.command(name="stop")
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
def command(file: Path) -> None:
    """End the deployment that FILE describes (./cluster.yaml by default).

    Ends exactly the processes that `mtppp launch` started on its nodes and their descendants,
    with their shared memory. Another Ray or vLLM on the same hosts is left alone. Logs stay.
    """
    deployment = from_file(file)
    try:
        run_phases(STOP, deployment, Console())
    finally:
        deployment.close()
