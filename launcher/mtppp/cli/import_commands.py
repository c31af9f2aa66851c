"""`mtppp import "vllm serve ..."`"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from mtppp.cli.models import facts_of
from mtppp.errors import ConfigurationError, Refused
from mtppp.gpus import GPU_TYPES
from mtppp.importer.commands import Found, find_commands
from mtppp.importer.draft import Draft
from mtppp.importer.judge import Judged, default_release, judge
from mtppp.importer.recipe import (
    HARDWARE,
    NONE,
    Choice,
    Recipe,
    default_strategy,
    is_recipe,
    read_recipe,
    recipe_command,
)
from mtppp.importer.strategies import Checked, check_strategies, draft_of
from mtppp.importer.translate import translate
from mtppp.importer.wishes import Device, Wishes
from mtppp.model.facts import ModelFacts

_FILE = Path("cluster.yaml")
_HEADER = """Made by `mtppp import` from {origin}."""
_WIDTH = 100


@click.command(name="import")
@click.argument("sources", nargs=-1, required=True, metavar="COMMAND|FILE...")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST",
    help="A host, in pipeline order: HOST, USER@HOST or HOST=ADDRESS. Once for each.",
)
@click.option(
    "--gpu",
    type=click.Choice(list(GPU_TYPES), case_sensitive=False),
    help="The GPUs of every node.",
)
@click.option(
    "--gpus", type=click.IntRange(min=1), help="GPUs per node, where the command leaves that open."
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="What the nodes compute with; cuda unless the command is plainly for CPUs.",
)
@click.option("--vllm", metavar="RELEASE", help="vLLM's release on the nodes.")
@click.option("--python", metavar="PATH", help="The Python on every node that has vLLM.")
@click.option(
    "--managed",
    is_flag=True,
    help="Have mtppp install vLLM on every node; --python is then what it is made with.",
)
@click.option(
    "--ssh-config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True),
    help="The ssh configuration that knows the nodes; ~/.ssh/config by default.",
)
@click.option("--name", help="The deployment's name; by default after the model.")
@click.option(
    "--set",
    "given",
    multiple=True,
    metavar="NAME=VALUE",
    help="A shell variable that the command uses.",
)
@click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    help="The model's config.json, or its directory, on this machine.",
)
@click.option("--strategy", help="Of a recipe: the strategy to take.")
@click.option(
    "--speculation", metavar="MODE", help="Of a recipe: mtp, another mode of it, or none."
)
@click.option(
    "--variant", default="default", show_default=True, help="Of a recipe: the checkpoint."
)
@click.option(
    "--strategies",
    "only_strategies",
    is_flag=True,
    help="Of a recipe: say of every strategy whether it starts as it is.",
)
@click.option("--check", is_flag=True, help="Exit status only: 0 when it can be launched.")
@click.option("--json", "as_json", is_flag=True, help="Print a report as JSON.")
def command(
    sources: tuple[str, ...],
    nodes: tuple[str, ...],
    gpu: str | None,
    gpus: int | None,
    device: Device | None,
    vllm: str | None,
    python: str | None,
    ssh_config: Path | None,
    name: str | None,
    given: tuple[str, ...],
    model_config: Path | None,
    strategy: str | None,
    speculation: str | None,
    variant: str,
    *,
    managed: bool,
    only_strategies: bool,
    check: bool,
    as_json: bool,
) -> int:
    """Turn `vllm serve` commands, or a recipe, into a cluster file.

    COMMAND is a command as one argument; FILE a script with one, or one per node; or a recipe of
    vllm-project/recipes; "-" reads standard input. The file goes to standard output; what was
    changed, and why, to standard error.

    \b
      mtppp import "vllm serve org/model -tp 8 -pp 2 ..." --node a=10.0.0.1 --node b=10.0.0.2
      mtppp import head.sh worker.sh --gpu H100-80GB > cluster.yaml
      mtppp import GLM-5.2.yaml --strategies --gpu H100-80GB
    """
    wishes = Wishes(nodes, name, vllm, python, gpus, gpu, device, managed, ssh_config)
    texts = [_text(source) for source in sources]
    recipes = [read_recipe(text, origin) for text, origin in texts if is_recipe(text)]
    if recipes and len(texts) > 1:
        raise ConfigurationError("a recipe is imported alone")
    if not recipes and (only_strategies or strategy or speculation):
        raise ConfigurationError(
            "--strategies, --strategy and --speculation are for recipes",
            hint="name a YAML file of vllm-project/recipes",
        )
    if recipes:
        recipe = recipes[0]
        choice = _choice(recipe, wishes, strategy, speculation, variant)
        if only_strategies:
            return _print_strategies(recipe, choice, model_config, as_json=as_json)
        draft = draft_of(recipe, choice, recipe_command(recipe, choice), wishes)
        draft.note(
            "moved",
            f"strategy {choice.strategy}",
            f"with speculation {choice.speculation} (--strategy and --speculation choose others)",
        )
        origin = f"{recipe.origin}, strategy {choice.strategy}"
    else:
        draft, origin = _draft(texts, wishes, _variables(given))
    facts = _facts(draft, model_config)
    draft.header = _HEADER.format(origin=origin)
    judged = judge(draft, facts, _FILE)
    return _finish(judged, check=check, as_json=as_json)


def _text(source: str) -> tuple[str, str]:
    """(text, what to call it); "" for a command on the command line."""
    if source == "-":
        return sys.stdin.read(), "standard input"
    if not source.strip():
        raise ConfigurationError(
            "the command to import is empty",
            hint='such as: mtppp import "vllm serve ORGANISATION/NAME --tensor-parallel-size 8"',
        )
    # A path may be too long to be one, or hold a NUL: such a text is a command.
    if "\n" in source or " " in source.strip():
        return source, ""
    path = Path(source)
    if not path.is_file():
        raise ConfigurationError(
            f"{source}: no such file", hint="a command is given as one argument, in quotes"
        )
    return path.read_text(encoding="utf-8"), source


def _variables(given: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for assignment in given:
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigurationError(f"--set {assignment}: must be NAME=VALUE")
        variables[name] = value
    return variables


def _draft(
    texts: list[tuple[str, str]], wishes: Wishes, variables: dict[str, str]
) -> tuple[Draft, str]:
    found = Found()
    for text, origin in texts:
        part = find_commands(text, origin, variables)
        found.serve += part.serve
        found.other += part.other
    if not found.serve:
        raise ConfigurationError(
            "there is no command that serves a model",
            hint="such as: vllm serve ORGANISATION/NAME --tensor-parallel-size 8",
        )
    origins = ", ".join(origin for _, origin in texts if origin) or "a command"
    base = Path(texts[0][1]).parent if texts[0][1] else Path()
    draft = translate(found.serve, wishes, default_release=default_release(), base=base)
    for other in found.other:
        draft.note("moved", other, "mtppp starts a Ray of its own on the nodes")
    return draft, origins


def _choice(
    recipe: Recipe,
    wishes: Wishes,
    strategy: str | None,
    speculation: str | None,
    variant: str,
) -> Choice:
    gpu = wishes.gpu_type or "H100-80GB"
    if gpu not in HARDWARE:
        raise ConfigurationError(f"recipes know no {gpu}; they know {', '.join(HARDWARE)}")
    nodes = len(wishes.nodes) or 2
    return Choice(
        strategy=strategy or default_strategy(recipe, nodes),
        gpu=gpu,
        gpus=wishes.gpus or 8,
        nodes=nodes,
        variant=variant,
        speculation=speculation or ("mtp" if "mtp" in recipe.modes else NONE),
    )


def _facts(draft: Draft, model_config: Path | None) -> ModelFacts | None:
    """What the model is; a note where nobody here can tell."""
    facts, problem = facts_of(draft.model, draft.revision, model_config)
    if facts is None:
        draft.note(
            "warning",
            draft.model,
            f"its config.json is not to be had here ({problem}), so its layers, its memory and "
            "what is proven were not looked at; --model-config gives it",
        )
    return facts


def _finish(judged: Judged, *, check: bool, as_json: bool) -> int:
    draft = judged.draft
    refused = judged.verdict is not None and not judged.verdict.allowed
    status = Refused.exit_status if check and refused else 0
    if check:
        return status
    if as_json:
        report: dict[str, Any] = {
            **draft.report(),
            "file": draft.text(),
            "launchable": None if judged.verdict is None else judged.verdict.allowed,
            "layer_partition": judged.partition,
        }
        click.echo(json.dumps(report, indent=2))
        return status
    click.echo(draft.text(), nl=False)
    for note in draft.sorted_notes():
        click.echo(_paragraph(f"{note.kind + ':':<9} {note.about}: {note.message}"), err=True)
    return status


def _paragraph(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False, break_long_words=False
    )


def _print_strategies(
    recipe: Recipe, choice: Choice, model_config: Path | None, *, as_json: bool
) -> int:
    variant = recipe.values.get("variants", {}).get(choice.variant, {})
    model = variant.get("model_id") or recipe.model["model_id"]
    facts, problem = facts_of(model, None, model_config)
    checked = check_strategies(recipe, facts, choice)
    if as_json:
        click.echo(json.dumps([entry.to_json() for entry in checked], indent=2))
        return 0
    where = f"{choice.gpus} x {choice.gpu} a node, {choice.nodes} nodes"
    click.echo(f"{model}, {where} where a strategy has several")
    if facts is None:
        click.echo(f"config.json not to be had ({problem}): layers and memory not looked at")
    for entry in checked:
        click.echo(_strategy(entry))
    return 0


def _strategy(entry: Checked) -> str:
    title = f"{entry.strategy}, speculation {entry.speculation}"
    lines = [f"\n{title:<44} {entry.outcome}"]
    lines += [
        textwrap.fill(reason, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        for reason in entry.reasons
    ]
    return "\n".join(lines)
