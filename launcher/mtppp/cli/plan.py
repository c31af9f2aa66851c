"""`mtppp plan`"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console as RichConsole
from rich.text import Text

from mtppp.cli.deployments import connectable, deployment_argument, resolve
from mtppp.cli.plan_page import page
from mtppp.cli.plan_view import view
from mtppp.console import Console
from mtppp.errors import ConfigurationError, Refused
from mtppp.phases.facts import host_problems
from mtppp.phases.phase import run_phases
from mtppp.phases.preview import WITH_HOSTS, WITHOUT_HOSTS, running_plan
from mtppp.plan.differences import Difference, differences
from mtppp.plan.report import report
from mtppp.plan.review import Review

DIFFERENT = 1


@click.command(name="plan")
@deployment_argument
@click.option("--connect", is_flag=True, help="Ask the hosts; nothing on them is changed.")
@click.option("--diff", is_flag=True, help="Say only how the Plan differs from what runs there.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also draw it as one page, without anything from elsewhere.",
)
def command(
    deployment: str | None, connect: bool, diff: bool, as_json: bool, html_file: Path | None
) -> None:
    """Show all that a launch would do (by default that of ./cluster.yaml), and do nothing.

    Stages, ranks, layers and why they are cut so; memory, and what fits into it; patches and what
    proves them; environment, commands and ports of every node; refusals and warnings with the way
    out. It is what a launch makes. No host is asked without --connect: what only a host knows is
    then <text in angle brackets>.

    \b
    Exit status: 0 nothing speaks against a launch, 4 it is refused, 2 the file still holds
    placeholders, 1 the hosts are not as the file says. With --diff, which connects: 0 what
    runs is as planned, 1 it differs or nothing runs.
    """
    target = connectable(resolve(deployment))
    try:
        run_phases(WITH_HOSTS if connect or diff else WITHOUT_HOSTS, target, Console())
        running = running_plan(target) if diff else None
    finally:
        target.close()
    reviewed = target.reviewed
    assert reviewed is not None
    if html_file is not None:
        _write(html_file, page(reviewed))
    if diff:
        found = None if running is None else differences(running, target.plan.fields())
        _show_differences(found, as_json=as_json)
        sys.exit(DIFFERENT if found is None or found else 0)
    wrong = host_problems(target) if connect else []
    _show(reviewed, wrong, as_json=as_json)
    sys.exit(_status(reviewed, wrong))


def _show(reviewed: Review, wrong: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        data = {**report(reviewed), "host_problems": list(wrong)}
        click.echo(json.dumps(data, indent=2, sort_keys=True, allow_nan=False))
        return
    console = _Pages(highlight=False, emoji=False)
    parts = view(reviewed, wrong, width=console.width, ascii_only=console.options.ascii_only)
    for part in parts:
        # Lines that must stay whole, to be copied, are left to the terminal to fold.
        console.print(part, soft_wrap=isinstance(part, Text))


class _Pages(RichConsole):
    """rich would end the process with a status that says that the hosts are not as they should."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _status(reviewed: Review, wrong: Sequence[str]) -> int:
    if reviewed.refusals:
        return Refused.exit_status
    if reviewed.placeholders:
        return ConfigurationError.exit_status
    return 1 if wrong else 0


def _show_differences(found: Sequence[Difference] | None, *, as_json: bool) -> None:
    if as_json:
        data = {
            "runs": found is not None,
            "same": found is not None and not found,
            "differences": [asdict(difference) for difference in found or ()],
        }
        click.echo(json.dumps(data, indent=2, sort_keys=True))
    elif found is None:
        click.echo("nothing of this deployment runs: a launch would start all of it")
    elif not found:
        click.echo("what runs is as planned")
    else:
        click.echo("\n".join(str(difference) for difference in found))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be written: {error.strerror}") from None
