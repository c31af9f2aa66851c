"""`mtppp launch cluster.yaml`"""

from __future__ import annotations

import sys

import click

from mtppp.cli.deployments import (
    connectable,
    deployment_argument,
    is_protected,
    no_more_in,
    resolve,
    working_on,
)
from mtppp.console import Console
from mtppp.phases.launch import launch_phases
from mtppp.phases.phase import run_phases
from mtppp.phases.reach import reachable_from_here


@click.command(name="launch")
@deployment_argument
@click.option(
    "--restart", is_flag=True, help="Stop what runs and is wrong or not as planned, then launch."
)
@click.option("--yes", metavar="NAME", help="The name that a protected deployment wants.")
def command(deployment: str | None, restart: bool, yes: str | None) -> None:
    """Launch a deployment (by default that of ./cluster.yaml).

    Connects to the nodes, starts Ray and vLLM there, waits until the server is ready, checks what
    every rank holds, asks for the first tokens, and verifies what comes: by the baseline that the
    file names, else by a few answers that the model scores itself. Until then requests of others
    get 503. When a step fails, what was started is stopped. What runs already as planned is left
    as it is; what is broken is stopped and launched anew.

    Exit status: 0 done, 1 failed or FAIL, 2 invalid usage, 3 INCONCLUSIVE, 4 refused.
    """
    console = Console()
    known = resolve(deployment)
    for host in no_more_in(known):
        console.say(f"{host} is no more in {known.file}: what was launched there is not stopped")
    target = connectable(known, with_secrets=True)
    target.restart = restart
    target.protected = is_protected(known) and yes != known.cluster.name
    with working_on(target, console):
        run_phases(launch_phases(target.cluster), target, console)
    for line in target.report:
        console.say(line)
    plan = target.plan
    does = "holds" if target.holding else "serves"
    console.say(f"{plan.name} {does} {plan.served_name} at {plan.endpoint}/v1")
    if not reachable_from_here(plan.endpoint, plan.served_name):
        console.say(f"that cannot be reached from here: mtppp forward {plan.name}")
    console.say(f"stop it with: mtppp stop {plan.name}")
    sys.exit(target.exit_status)
