"""`mtppp launch cluster.yaml`"""

from __future__ import annotations

from pathlib import Path

import click

from mtppp.cli.deployments import from_file
from mtppp.console import Console
from mtppp.phases.launch import LAUNCH
from mtppp.phases.phase import run_phases


@click.command(name="launch")
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
def command(file: Path) -> None:
    """Launch the deployment that FILE describes (./cluster.yaml by default).

    Connects to the nodes, starts Ray and vLLM there, waits until the server is ready, checks what
    every rank holds, and asks for the first tokens. When a step fails, what was started is stopped.
    """
    console = Console()
    deployment = from_file(file)
    try:
        run_phases(LAUNCH, deployment, console)
    finally:
        deployment.close()
    plan = deployment.plan
    console.say(f"{plan.name} serves {plan.served_name} at {plan.endpoint}/v1")
    console.say(f"stop it with: mtppp stop {file}")
