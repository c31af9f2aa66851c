"""What the commands that verify have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from mtppp.verify.prompts import Prompt, own_set, read_file
from mtppp.verify.servers import Server
from mtppp.verify.session import Outcome
from mtppp.verify.tiers import TIERS, Tier

Function = TypeVar("Function", bound=Callable[..., Any])

tier_option = click.option(
    "--tier", type=click.Choice(list(TIERS)), help="How much; smoke if nothing else is said."
)
prompts_option = click.option(
    "--prompts",
    "prompt_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Your own prompts, JSON Lines, in place of mtppp's.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="result.json on standard output."
)


def server_options(role: str, help_: str) -> Callable[[Function], Function]:
    """--ROLE-url and --ROLE-model."""

    def add(function: Function) -> Function:
        url = click.option(f"--{role}-url", metavar="URL", default="", help=help_)
        name = click.option(
            f"--{role}-model", metavar="NAME", default="", help="The model's name there."
        )
        return url(name(function))

    return add


def asking_options(function: Function) -> Function:
    """How servers are asked."""
    for option in (
        click.option("--timeout", default=600.0, show_default=True, help="Seconds for an answer."),
        click.option(
            "--concurrency",
            default=16,
            show_default=True,
            type=click.IntRange(1, 1024),
            help="Requests at a time.",
        ),
    ):
        function = option(function)
    return function


def output_option(help_: str) -> Callable[[Function], Function]:
    """-o DIR"""
    return click.option(
        "-o", "--output", metavar="DIR", type=click.Path(path_type=Path), help=help_
    )


def new_directory() -> Path:
    """Where a run is written when nothing is said."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("mtppp-verify") / f"{now}-{os.getpid()}"


def server(role: str, url: str, model: str) -> Server:
    """A server, its key from the environment."""
    return Server(role, url, model, os.environ.get(f"MTPPP_{role.upper()}_KEY", ""))


def prompts_of(file: Path | None, tier: Tier) -> list[Prompt]:
    return read_file(file) if file else own_set(tier.requests)


def show(outcome: Outcome, *, as_json: bool) -> None:
    click.echo(json.dumps(outcome.result, indent=1) if as_json else "\n".join(outcome.lines))
