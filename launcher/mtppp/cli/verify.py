"""`mtppp verify`"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mtppp.cli import verify_options as options
from mtppp.console import Console
from mtppp.errors import ConfigurationError
from mtppp.verify.run import Settings
from mtppp.verify.session import verify
from mtppp.verify.tiers import TIERS


@click.command(name="verify")
@options.server_options("candidate", "The server in question.")
@options.server_options("baseline", "One that is right: the same weights, TP only, no drafts.")
@options.tier_option
@options.prompts_option
@options.asking_options
@click.option(
    "--same-model", is_flag=True, help="Both have the same weights, whatever their paths say."
)
@options.output_option("Where to write; a run that was interrupted goes on there.")
@options.json_option
def command(
    candidate_url: str,
    candidate_model: str,
    baseline_url: str,
    baseline_model: str,
    tier: str,
    prompt_file: Path | None,
    concurrency: int,
    timeout: float,
    same_model: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Decide whether one server gives the same model as another.

    Asks both the same, has the baseline score each token that the candidate emits, and says PASS,
    FAIL or INCONCLUSIVE with what it rests on. Without a baseline the candidate scores itself,
    which sees less. Keys are read from MTPPP_CANDIDATE_KEY and MTPPP_BASELINE_KEY.

    Exit status: 0 PASS, 1 FAIL, 2 invalid usage, 3 INCONCLUSIVE.
    """
    if not candidate_url:
        raise ConfigurationError("nothing to verify", hint="give --candidate-url")
    console = Console()
    with console.step("verify") as step:
        outcome = verify(
            output or options.new_directory(),
            Settings(TIERS[tier], concurrency, timeout, same_model),
            options.prompts_of(prompt_file, TIERS[tier]),
            candidate=options.server("candidate", candidate_url, candidate_model),
            baseline=options.server("baseline", baseline_url, baseline_model)
            if baseline_url
            else None,
            about={},
            progress=step.progress,
        )
        step.note = outcome.verdict.outcome
    options.show(outcome, as_json=as_json)
    sys.exit(outcome.verdict.exit_status)
