"""`mtppp init`"""

from __future__ import annotations

from pathlib import Path

import click

from mtppp.cli.models import facts_of
from mtppp.errors import ConfigurationError
from mtppp.gpus import GPU_TYPES
from mtppp.importer.draft import Draft, NodeDraft
from mtppp.importer.judge import default_release, judge
from mtppp.importer.nodes import node_of
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
    model = model or click.prompt("Model (hub id, or path on the nodes)", err=True)
    hosts = [node_of(text) for text in nodes] or _ask_nodes()
    user = user if yes or user else _ask_user()
    gpus = gpus or (8 if yes else click.prompt("GPUs per node", default=8, type=int, err=True))
    if not (python or managed):
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
    judged = judge(draft, facts, file)
    with file.open("x", encoding="utf-8") as out:
        out.write(draft.text())
    if facts is None:
        click.echo(f"{model}: {problem}; written without knowing the model", err=True)
    for note in judged.draft.sorted_notes():
        if note.kind in _SAID:
            click.echo(f"{note.kind}: {note.about}: {note.message}", err=True)
    click.echo(f"{file} written", err=True)


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
        text = click.prompt(
            f"Node {len(nodes) + 1} (HOST=ADDRESS{', empty: no more' if nodes else ''})",
            default="" if nodes else None,
            show_default=False,
            err=True,
        )
        if not text:
            return nodes
        nodes.append(node_of(text))


def _ask_python() -> str:
    """ "" when mtppp is to install vLLM."""
    answer: str = click.prompt(
        f"Python that has vLLM, on every node, such as {DEFAULT_PYTHON} (empty: mtppp installs it)",
        default="",
        show_default=False,
        err=True,
    )
    return answer


def _ask_user() -> str | None:
    answer: str = click.prompt(
        "User on the nodes (empty: as ssh is configured)", default="", show_default=False, err=True
    )
    return answer or None
