"""`mtppp answers export|score`: verify in two steps, at two places."""

from __future__ import annotations

import sys
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


@click.group(name="answers")
def command() -> None:
    """Have a candidate answer here, and a baseline judge the answers elsewhere.

    For when the two cannot run at the same time or at the same place.
    """


@command.command(name="export")
@deployment_argument
@options.server_options("candidate", "The server in question.")
@options.tier_option
@options.prompts_option
@options.asking_options
@click.option(
    "-o", "--output", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Where."
)
def export(
    deployment: str | None,
    candidate_url: str,
    candidate_model: str,
    tier: str | None,
    prompt_file: Path | None,
    concurrency: int,
    timeout: float,
    output: Path,
) -> None:
    """Keep a candidate's answers, to be scored later."""
    if not candidate_url and not deployment:
        raise ConfigurationError(
            "nothing to ask", hint="name a deployment, or give --candidate-url"
        )
    chosen = TIERS[tier or SMOKE]
    console = Console()
    with (
        named("candidate", deployment, candidate_url, candidate_model) as (candidate, about),
        console.step("export") as step,
    ):
        count = session.export(
            output,
            Settings(chosen, concurrency, timeout),
            options.prompts_of(prompt_file, chosen),
            candidate=candidate,
            about={"candidate": about},
            progress=step.count,
        )
        step.note = f"{count} answers in {output}"
    console.say(f"score them with: mtppp answers score {output} --baseline-url URL")


@command.command(name="score")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@options.server_options("baseline", "One that is right: the same weights, TP only, no drafts.")
@options.prompts_option
@options.asking_options
@click.option(
    "--same-model", is_flag=True, help="Both have the same weights, whatever their paths say."
)
@options.json_option
def score(
    directory: Path,
    baseline_url: str,
    baseline_model: str,
    prompt_file: Path | None,
    concurrency: int,
    timeout: float,
    same_model: bool,
    as_json: bool,
) -> None:
    """Judge exported answers, as `mtppp verify` would; the candidate need not run any more.

    What only the candidate could tell, the cause of a fault, stays unknown.
    """
    if not baseline_url:
        raise ConfigurationError("nobody to judge", hint="give --baseline-url")
    tier = session.recorded_tier(directory)
    with Console().step("score") as step:
        outcome = session.score(
            directory,
            Settings(tier, concurrency, timeout, same_model),
            options.prompts_of(prompt_file, tier),
            baseline=options.server("baseline", baseline_url, baseline_model),
            about={},
            progress=step.count,
        )
        step.note = outcome.verdict.headline
        step.succeeded = outcome.verdict.passed
    options.show(outcome, as_json=as_json)
    sys.exit(outcome.verdict.exit_status)
