"""`mtppp baseline record`"""

from __future__ import annotations

from pathlib import Path

import click

from mtppp.cli import verify_options as options
from mtppp.cli.deployments import deployment_argument
from mtppp.cli.verify_servers import named
from mtppp.console import Console
from mtppp.errors import ConfigurationError
from mtppp.verify import session
from mtppp.verify.run import Settings
from mtppp.verify.tiers import SMOKE, TIERS


@click.group(name="baseline")
def command() -> None:
    """Keep what a server that is right answers, to verify others by it later."""


@command.command(name="record")
@deployment_argument
@options.server_options("baseline", "One that is right: the same weights, TP only, no drafts.")
@options.tier_option
@options.prompts_option
@options.asking_options
@click.option(
    "-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where."
)
def record(
    deployment: str | None,
    baseline_url: str,
    baseline_model: str,
    tier: str | None,
    prompt_file: Path | None,
    concurrency: int,
    timeout: float,
    output: Path,
) -> None:
    """Have a baseline answer and score its answers; a run that was interrupted goes on in DIR.

    Of a deployment its layout, command, weights and configuration are kept, too; of a URL what the
    server says. A server that disagrees with itself is no baseline: exit status 3.
    """
    if not baseline_url and not deployment:
        raise ConfigurationError(
            "nothing to record", hint="name a deployment, or give --baseline-url"
        )
    chosen = TIERS[tier or SMOKE]
    console = Console()
    with (
        named("baseline", deployment, baseline_url, baseline_model) as (baseline, about),
        console.step("record") as step,
    ):
        step.note = session.record_baseline(
            output,
            Settings(chosen, concurrency, timeout),
            options.prompts_of(prompt_file, chosen),
            baseline=baseline,
            about={"baseline": about},
            progress=step.count,
        )
    console.say(f"verify by it with: mtppp verify --baseline {output}")
