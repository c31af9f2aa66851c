"""`mtppp open`"""

from __future__ import annotations

import click

from mtppp.cli.deployments import connectable, deployment_argument, resolve_launched, working_on
from mtppp.console import Console
from mtppp.errors import ConfigurationError
from mtppp.phases.open import OPEN
from mtppp.phases.phase import run_phases


@click.command(name="open")
@deployment_argument
@click.option("--at-own-risk", is_flag=True, help="Needed: nothing has shown that it is right.")
def command(deployment: str | None, at_own_risk: bool) -> None:
    """Serve requests of others although the deployment was not verified, or did not PASS.

    A launch holds them until it has verified the deployment, and opens by itself then. What is
    opened by hand stays so until the server ends; `mtppp status` says who did it, and when.
    """
    known = resolve_launched(deployment)
    if not at_own_risk:
        raise ConfigurationError(
            f"{known.cluster.name} was not shown to be right: nothing was opened",
            hint=f"`mtppp launch {known.file}` verifies it; to serve all the same: --at-own-risk",
        )
    console = Console()
    target = connectable(known)
    with working_on(target, console):
        run_phases(OPEN, target, console)
