"""`mtppp status`"""

from __future__ import annotations

import sys

import click

from mtppp.cli.deployments import connectable, deployment_argument, resolve_launched
from mtppp.console import folded
from mtppp.phases.status import DeploymentStatus, ask, in_times
from mtppp.plan.admission import NOT_PROVEN

SHOWN = 5
"""Violations of invariants that are shown to a person, the latest."""


@click.command(name="status")
@deployment_argument
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
def command(deployment: str | None, as_json: bool) -> None:
    """Say what runs where (by default of ./cluster.yaml, else of the only deployment known).

    Asks every node, and the server for one token: a server whose engine hangs still calls itself
    healthy. Exit status 0 when a token came, and no rank was seen to compute another model than
    the rest, or when the deployment is stopped; 1 otherwise.
    """
    target = connectable(resolve_launched(deployment))
    try:
        status = ask(target)
    finally:
        target.close()
    if as_json:
        click.echo(status.to_json())
    else:
        show(status)
    sys.exit(exit_status(status))


def exit_status(status: DeploymentStatus) -> int:
    """0 when all is well or nothing runs, else 1."""
    return 0 if status.state in ("serving", "stopped") else 1


def _gate(status: DeploymentStatus) -> str:
    if status.gate == "closed":
        return "closed: `mtppp launch` verifies it and opens, `mtppp open` does at your own risk"
    if status.gate == "open":
        return f"open: {status.gate_why}"
    return "none, and not verified: verify.enabled is false in what was launched"


def show(status: DeploymentStatus) -> None:
    """Print a status for a person."""
    _tell(f"{status.name}: {status.state} ({status.explanation})")
    if status.endpoint:
        away = "" if status.reachable else f", not reachable from here: mtppp forward {status.name}"
        _tell(f"  endpoint   {status.endpoint}/v1{away}")
        _tell(f"  gate       {_gate(status)}")
    if status.seconds_to_token is not None:
        _tell(f"  one token  {status.seconds_to_token:g} s")
    if status.endpoint and not status.checked:
        _tell("  not checked: no launch has compared its ranks; `mtppp launch` does")
    if status.evidence not in ("", NOT_PROVEN):
        _tell(f"  proven by  {status.evidence}")
    _tell_doubts(status)
    for node in status.nodes:
        if node.problem:
            problem = node.problem.removeprefix(f"{node.host}: ")
            _tell(f"  {node.host}: could not be asked: {problem}")
            if node.hint:
                _tell(f"    hint: {node.hint}")
            continue
        processes = ", ".join(
            f"{role} {'up' if alive else 'GONE'}" for role, alive in (node.processes or {}).items()
        )
        since = f", launched by {node.by} at {node.since}" if node.since else ""
        held = f", {node.gpu_memory / 2**30:.1f} GiB of GPU memory" if node.gpu_memory else ""
        _tell(f"  {node.host}: {processes or 'nothing runs'}{held}{since}")
        if node.work:
            _tell(f"    {node.work}")
    for rank in status.ranks:
        layers = rank["layers"]
        _tell(
            f"  rank {rank['rank']} on {rank['node']}: stage {rank['stage']}, tensor rank"
            f" {rank['tensor_rank']}, layers {layers[0]}-{layers[-1]}"
            f"{', drafter' if rank['drafter'] else ''}, patches {', '.join(rank['patches'])}"
            f"{'' if rank['alive'] else '  GONE'}"
        )


def _tell_doubts(status: DeploymentStatus) -> None:
    """What is against it, or not looked after."""
    if status.at_own_risk:
        _tell(f"  AT YOUR OWN RISK, not proven to be right: {', '.join(status.at_own_risk)}")
    if status.invariants == "off" and len({rank["stage"] for rank in status.ranks}) > 1:
        _tell("  no invariants are watched: ranks are not compared while it serves")
    for invariant, times in status.violations.items():
        _tell(f"  WRONG: invariant {invariant} did not hold, {in_times(times)}")
    for violation in status.violated[-SHOWN:]:
        _tell(f"    {violation}")


def _tell(line: str) -> None:
    click.echo(folded(line))
