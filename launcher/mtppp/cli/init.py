"""`mtppp init`"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mtppp.cli.models import facts_of
from mtppp.errors import ConfigurationError
from mtppp.gpus import GPU_TYPES
from mtppp.importer.draft import Draft, NodeDraft
from mtppp.importer.judge import default_release, judge
from mtppp.importer.nodes import node_of, note_nodes
from mtppp.importer.translate import DEFAULT_PYTHON, name_of
from mtppp.model.facts import ModelFacts

_HEADER = """One deployment: a model, the nodes it runs on and how. Look at it with `mtppp plan`,
start it with `mtppp launch`. Every key is described in docs/cluster-yaml.md."""
_DRAFTS = 3
_SAID = ("fill in", "refused", "warning")
"""Kinds of notes that concern a person who has seen no other form of this deployment."""


@click.command(name="init")
@click.argument("file", type=click.Path(path_type=Path), default=Path("cluster.yaml"))
@click.option("--model", help="A hub id, or a path that exists on every node.")
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="HOST=ADDRESS",
    help="A host and its "
    "address on the network between the nodes, in pipeline order. Once for each.",
)
@click.option("--user", help="User on the nodes; your ssh configuration's if not given.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs per node.")
@click.option(
    "--gpu", type=click.Choice(list(GPU_TYPES), case_sensitive=False), help="Which GPUs they are."
)
@click.option("--python", help="The Python on every node that has vLLM.")
@click.option("--managed", is_flag=True, help="Have mtppp install vLLM on every node instead.")
@click.option("--vllm", metavar="RELEASE", help="vLLM's release there.")
@click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    help="The model's config.json on this machine.",
)
@click.option("--yes", is_flag=True, help="Ask nothing; take the defaults.")
def command(
    file: Path,
    model: str | None,
    nodes: tuple[str, ...],
    user: str | None,
    gpus: int | None,
    gpu: str | None,
    python: str | None,
    vllm: str | None,
    model_config: Path | None,
    *,
    managed: bool,
    yes: bool,
) -> None:
    """Write a first cluster file, ./cluster.yaml by default. Never overwrites one.

    Asks for what is not given as an option: the model, the nodes, and where vLLM is.
    """
    if file.exists():
        raise ConfigurationError(
            f"{file} exists", hint="name another file, or remove this one; init never overwrites"
        )
    if yes and not (model and nodes):
        raise ConfigurationError("--yes asks nothing: --model and --node are needed")
    model = model or _prompt("Model (hub id, or path on the nodes)")
    hosts = [node_of(text) for text in nodes] or _ask_nodes()
    user = user if yes or user else _ask_user()
    guessed = [] if gpus or not yes else ["gpus"]
    gpus = gpus or (8 if yes else _prompt("GPUs per node", default=8, type=int))
    if not (python or managed):
        guessed += ["python"] if yes else []
        python = DEFAULT_PYTHON if yes else _ask_python()
        managed = not python
    facts, problem = facts_of(model, None, model_config)
    draft = first_draft(
        model,
        [NodeDraft(node.host, node.address, node.user or user or "") for node in hosts],
        gpus=gpus,
        gpu_type=gpu,
        python=python or "",
        managed=managed,
        vllm=vllm,
        facts=facts,
    )
    note_nodes(draft)
    _note_guesses(draft, guessed)
    judged = judge(draft, facts, file)
    with file.open("x", encoding="utf-8") as out:
        out.write(draft.text())
    if facts is None:
        click.echo(f"{_why_unknown(model, problem)}; written without knowing the model", err=True)
    for note in judged.draft.sorted_notes():
        if note.kind in _SAID:
            click.echo(f"{note.kind}: {note.about}: {note.message}", err=True)
    kinds = {note.kind for note in judged.draft.notes}
    first = "fill in what is named above, then" if "fill in" in kinds else "look at it with"
    on_nodes = "--connect " if facts is None and _is_path(model) else ""
    click.echo(f"{file} written; {first}: mtppp plan {on_nodes}{shlex.quote(str(file))}", err=True)


def _note_guesses(draft: Draft, guessed: Sequence[str]) -> None:
    """What --yes took without being told."""
    if "gpus" in guessed:
        draft.comments["gpus_per_node",] = "SET THIS: how many GPUs every node has"
        draft.note("fill in", "gpus_per_node", f"{draft.gpus} was assumed (or give --gpus)")
    if "python" in guessed:
        draft.comments["runtime", "python"] = "SET THIS: the Python on every node that has vLLM"
        draft.note(
            "fill in",
            "runtime.python",
            f"{draft.python} was assumed (or give --python, or --managed: mtppp installs vLLM)",
        )


def _why_unknown(model: str, problem: str) -> str:
    if not _is_path(model):
        return problem
    return (
        f"{model} is not on this machine (plan it with --connect, which reads it on the nodes, or "
        "give --model-config)"
    )


def _is_path(model: str) -> bool:
    return model.startswith(("/", "~", "."))


def _prompt(text: str, **settings: Any) -> Any:
    """An answer; the question goes to standard error.

    Raises:
        ConfigurationError: there is nobody to answer.
    """
    try:
        return click.prompt(text, err=True, **settings)
    except click.Abort as abort:
        if not isinstance(abort.__context__, EOFError):
            raise
        click.echo(err=True)  # below the question
        raise ConfigurationError(
            "standard input ended before everything was answered",
            hint="give --model, --node for each node, and --yes",
        ) from None


def first_draft(
    model: str,
    nodes: list[NodeDraft],
    *,
    gpus: int,
    gpu_type: str | None,
    python: str,
    managed: bool,
    vllm: str | None,
    facts: ModelFacts | None,
) -> Draft:
    """Tensor parallelism inside every node, a pipeline over the nodes, and the model's MTP."""
    draft = Draft(
        name=name_of(model),
        model=model,
        nodes=nodes,
        gpus=gpus,
        gpu_type=gpu_type,
        vllm=vllm or default_release(),
        python=python,
        managed=managed,
        release_from="wish" if vllm else "default",
        tensor=gpus,
        pipeline=len(nodes),
        tokens=_DRAFTS if facts is None or facts.mtp_layers else 0,
        header=_HEADER,
    )
    draft.comments = {
        (
            "nodes",
        ): "In pipeline order: the first has stage 0 and the API server, the last the last "
        "stage and the drafter. `address` is on the network between the nodes.",
        ("runtime", "vllm"): "every node is checked to have this release",
        ("parallel", "tensor"): "GPUs that share each layer, inside one node",
        ("parallel", "pipeline"): "stages, one or more per node",
        ("parallel", "layer_partition"): "or the layers of each stage, such as [42, 36]",
        ("serve", "port"): "further flags of `vllm serve` go under serve.args",
    }
    if draft.tokens:
        draft.comments["speculative", "tokens"] = "drafted for each step by the model's MTP layer"
    return draft


def _ask_nodes() -> list[NodeDraft]:
    """Until an empty line."""
    nodes: list[NodeDraft] = []
    while True:
        text = _prompt(
            f"Node {len(nodes) + 1} (HOST=ADDRESS{', empty: no more' if nodes else ''})",
            default="" if nodes else None,
            show_default=False,
        )
        if not text:
            return nodes
        nodes.append(node_of(text))


def _ask_python() -> str:
    """ "" when mtppp is to install vLLM."""
    answer: str = _prompt(
        f"Python that has vLLM, on every node, such as {DEFAULT_PYTHON} (empty: mtppp installs it)",
        default="",
        show_default=False,
    )
    return answer


def _ask_user() -> str | None:
    answer: str = _prompt(
        "User on the nodes (empty: as ssh is configured)", default="", show_default=False
    )
    return answer or None
