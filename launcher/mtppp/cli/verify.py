"""`mtppp verify`"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from mtppp.cli import verify_options as options
from mtppp.cli.deployments import connectable, deployment_argument, resolve
from mtppp.console import Console
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import AT_OWN_RISK
from mtppp.phases.identity import identity
from mtppp.phases.status import DeploymentStatus, ask
from mtppp.phases.verify import candidate_of
from mtppp.verify.run import Settings
from mtppp.verify.servers import Server
from mtppp.verify.session import recorded_tier, verify, verify_by_stored
from mtppp.verify.tiers import SMOKE, TIERS

SERVER_KEY = "VLLM_API_KEY"


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
    if candidate_url and deployment:
        raise ConfigurationError(
            f"{deployment} and --candidate-url both name the candidate", hint="give one of them"
        )
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
        about: dict[str, dict[str, Any]] = {}
        if candidate_url:
            candidate = options.server("candidate", candidate_url, candidate_model)
        else:
            target = connectable(resolve(deployment))
            # The only secret of its file that matters here.
            if SERVER_KEY in target.cluster.secrets and SERVER_KEY in os.environ:
                target.secrets = {SERVER_KEY: os.environ[SERVER_KEY]}
            stack.enter_context(closing(target))
            candidate, about["candidate"] = _serving(target)
        step = stack.enter_context(console.step("verify"))
        common = partial(
            verify_by_stored if stored else verify,
            output or options.new_directory(),
            settings=Settings(chosen, concurrency, timeout, same_model),
            prompts=options.prompts_of(prompt_file, chosen),
            candidate=candidate,
            about=about,
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


def _serving(target: Deployment) -> tuple[Server, dict[str, Any]]:
    """The server of a deployment that runs, and what its ranks attest.

    Raises:
        MtpppError: it does not serve.
    """
    status = ask(target)
    if status.state not in ("serving", "gated"):
        problems = [f"{node.host}: {node.problem}" for node in status.nodes if node.problem]
        raise MtpppError(
            f"{status.name} is {status.state}: {status.explanation}",
            details=problems,
            hint=_way_out(status, target.file),
        )
    parallel, speculative = target.cluster.parallel, target.cluster.speculative
    about = {
        "launched": next((node.since for node in status.nodes if node.since), ""),
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "drafts": speculative.tokens if speculative else 0,
        "evidence": status.evidence,
        "patches": " ".join(sorted({name for rank in status.ranks for name in rank["patches"]})),
    }
    about |= identity(target)
    if AT_OWN_RISK in status.gate_why:
        about["gate"] = f"open, {status.gate_why}"
    if status.at_own_risk:
        about["at own risk"] = " ".join(status.at_own_risk)
    return candidate_of(target, status.endpoint), about


def _way_out(status: DeploymentStatus, file: Path) -> str:
    if status.state == "wrong":
        return (
            f"--candidate-url {status.endpoint} asks it all the same;"
            f" `mtppp launch --restart {file}` launches it anew"
        )
    if status.endpoint and status.state == "unknown":
        return "verify needs the key that it was launched with"
    if status.state == "unknown":
        return "see that its hosts can be reached, then verify again"
    return f"launch it first: mtppp launch {file}"
