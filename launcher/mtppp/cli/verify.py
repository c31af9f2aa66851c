"""`mtppp verify`"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click

from mtppp.cli import verify_options as options
from mtppp.cli.deployments import deployment_argument
from mtppp.cli.verify_servers import named
from mtppp.console import Console
from mtppp.errors import ConfigurationError
from mtppp.verify.run import Settings
from mtppp.verify.session import recorded_tier, verify, verify_by_stored
from mtppp.verify.tiers import SMOKE, TIERS


@click.command(name="verify")
@deployment_argument
@options.server_options("candidate", "The server in question.")
@options.server_options("baseline", "One that is right: the same weights, TP only, no drafts.")
@click.option(
    "--baseline",
    "stored",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="One that `mtppp baseline record` has kept, in place of a server.",
)
@options.tier_option
@options.prompts_option
@options.asking_options
@click.option(
    "--same-model", is_flag=True, help="Both have the same weights, whatever their paths say."
)
@options.output_option("Where to write; a run that was interrupted goes on there.")
@options.json_option
def command(
    deployment: str | None,
    candidate_url: str,
    candidate_model: str,
    baseline_url: str,
    baseline_model: str,
    stored: Path | None,
    tier: str | None,
    prompt_file: Path | None,
    concurrency: int,
    timeout: float,
    same_model: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Decide whether a server gives the same model as another.

    The candidate is a deployment (by default that of ./cluster.yaml) or any server by its URL. Asks
    both the same, has the baseline score each token that the candidate emits, and says PASS,
    FAIL or INCONCLUSIVE with what it rests on. Without a baseline the candidate scores itself,
    which sees less. Keys are read from MTPPP_CANDIDATE_KEY and MTPPP_BASELINE_KEY.

    Exit status: 0 PASS, 1 FAIL, 2 invalid usage, 3 INCONCLUSIVE.
    """
    if stored and baseline_url:
        raise ConfigurationError(
            f"{stored} and --baseline-url both are baselines", hint="give one of them"
        )
    chosen = recorded_tier(stored) if stored else TIERS[tier or SMOKE]
    if tier not in (None, chosen.name):
        raise ConfigurationError(
            f"{stored} was recorded for --tier {chosen.name}", hint="leave --tier out"
        )
    console = Console()
    with ExitStack() as stack:
        candidate, about = stack.enter_context(
            named("candidate", deployment, candidate_url, candidate_model)
        )
        step = stack.enter_context(console.step("verify"))
        common = partial(
            verify_by_stored if stored else verify,
            output or options.new_directory(),
            settings=Settings(chosen, concurrency, timeout, same_model),
            prompts=options.prompts_of(prompt_file, chosen),
            candidate=candidate,
            about={"candidate": about},
            progress=step.count,
        )
        if stored:
            outcome = common(stored=stored)
        else:
            baseline = options.server("baseline", baseline_url, baseline_model)
            outcome = common(baseline=baseline if baseline_url else None)
        step.note = outcome.verdict.headline
        step.succeeded = outcome.verdict.passed
    options.show(outcome, as_json=as_json)
    sys.exit(outcome.verdict.exit_status)
