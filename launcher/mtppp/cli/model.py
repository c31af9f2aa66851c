"""`mtppp model`: what a model is, before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtppp.model.checkpoint import measure
from mtppp.model.config import find_config
from mtppp.model.describe import describe
from mtppp.model.facts import read_facts

_RULER = 10
_LAYERS_A_ROW = 60
_MARKS: Mapping[str, Mapping[str | None, str]] = {
    "mlp": {"dense": "d", "moe": "M"},
    "attention": {"mla": "L", "full": "A", "sliding": "w", "linear": "n"},
    "indexer": {"full": "F", "shared": "s", None: "."},
}
_LEGEND = {
    "mlp": "d dense, M mixture of experts",
    "attention": "L latent (MLA), A full, w sliding window, n linear",
    "indexer": "F picks tokens itself, s shares the pick of the F before it",
    "start": "^ a pipeline stage may begin here",
}


@click.group(name="model")
def command() -> None:
    """Look at a model."""


@command.command()
@click.argument("model_path_or_id", metavar="DIR|ID")
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option(
    "--kv-cache-dtype",
    "cache_type",
    default="auto",
    show_default=True,
    help="State the KV cache's size for this type.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(model_path_or_id: str, revision: str | None, cache_type: str, as_json: bool) -> None:
    """Layers, sizes, KV cache and legal cuts of the model, from its config.json alone.

    DIR is a model's directory or its config.json; ID is looked up in the bundled catalogue, the
    Hugging Face cache and then on the hub. Exact sizes are read where safetensors lie beside it.
    """
    config = find_config(model_path_or_id, revision=revision)
    facts = read_facts(config.values)
    checkpoint = measure(config.directory, facts.layer_count) if config.directory else None
    report = describe(config, facts, checkpoint, cache_type)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    console = Console(highlight=False)
    console.print(_summary(report))
    if report["layers"]:
        console.print()
        console.print(_layer_map(report))
    for heading, lines in (("Not known", report["unknowns"]), ("Note", report["notes"])):
        for line in lines:
            console.print(Text(f"{heading}: ", style="yellow").append(line, style="default"))


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _summary_rows(report):
        if value:
            table.add_row(name, Text(value))
    return table


def _summary_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    mtp, cache, couplings = report["mtp"], report["cache"], report["couplings"]
    experts = report["experts"]
    return [
        ("model", f"{report['model_type'] or '(no model_type)'}, {report['architecture']}"),
        ("from", report["origin"]),
        ("layers", _layers(report)),
        ("attention", _attention(report)),
        (
            "experts",
            f"{experts['count']}, {experts['chosen'] or '?'} per token, "
            f"{experts['shared'] or 'no'} shared"
            if experts
            else "",
        ),
        ("quantisation", _quantisation(report["quantisation"])),
        ("parameters", _count(report["parameters"], mtp["parameters"])),
        ("checkpoint", _checkpoint(report)),
        ("KV cache", _cache(cache)),
        ("context", f"{report['native_context']:,} tokens" if report["native_context"] else ""),
        ("drafter", _drafters(mtp["drafters"])),
        ("stage starts", _starts(couplings, report["layer_count"])),
        ("config hash", report["config_hash"][:16]),
    ]


def _layers(report: dict[str, Any]) -> str:
    count = report["mtp"]["count"]
    text = str(report["layer_count"])
    if report["layers"]:
        kinds = [layer["mlp"] for layer in report["layers"]]
        named = (("dense", "dense"), ("moe", "mixture of experts"))
        parts = [f"{kinds.count(kind)} {name}" for kind, name in named if kind in kinds]
        text += f" ({', '.join(parts)})"
    return f"{text} + {count} MTP" if count else text


def _attention(report: dict[str, Any]) -> str:
    parts = []
    if report["attention_heads"]:
        parts.append(f"{report['attention_heads']} heads")
    if report["latent"]:
        parts.append(f"latent of {report['latent']['key_value_rank']}")
    elif report["key_value_heads"]:
        parts.append(f"{report['key_value_heads']} key/value heads")
    if report["index_topk"]:
        parts.append(f"sparse over {report['index_topk']} tokens (DSA)")
    return ", ".join(parts)


def _quantisation(quantisation: dict[str, Any]) -> str:
    block = quantisation["block"]
    return (
        f"{quantisation['method']}, blocks of {block[0]} x {block[1]}"
        if block
        else (quantisation["method"])
    )


def _count(parameters: int | None, mtp: int | None) -> str:
    if parameters is None:
        return "not known"
    inside = f", of which MTP {mtp / 1e9:.2f} B" if mtp else ""
    return f"{parameters / 1e9:.2f} B{inside}"


def _checkpoint(report: dict[str, Any]) -> str:
    calculated, measured = report["bytes"], report["measured"]
    parts = []
    if calculated is not None:
        parts.append(f"{calculated / 2**30:.1f} GiB calculated")
    if measured:
        parts.append(f"{measured['total'] / 2**30:.1f} GiB measured")
    return ", ".join(parts) or "not known"


def _cache(cache: dict[str, Any]) -> str:
    if cache["bytes_per_token"] is None:
        return "not known"
    text = f"{cache['bytes_per_token']:,} B per token"
    if cache["bytes_per_token_with_mtp"] != cache["bytes_per_token"]:
        text += f", {cache['bytes_per_token_with_mtp']:,} with the MTP layers"
    if cache["bytes_per_request"]:
        text += f"; {cache['bytes_per_request'] / 2**20:.1f} MiB per request"
    return f"{text} (type {cache['type']}, TP 1)"


def _drafters(drafters: Sequence[dict[str, str]]) -> str:
    return ", ".join(f"{entry['architecture']} from {entry['since']}" for entry in drafters)


def _starts(couplings: dict[str, Any], layers: int) -> str:
    if not couplings["known"]:
        return "not known"
    return f"{len(couplings['stage_starts'])} of {layers} layers ({couplings['evidence']})"


def _layer_map(report: dict[str, Any]) -> Text:
    """One column a layer, in rows of `_LAYERS_A_ROW`."""
    layers = report["layers"]
    starts = set(report["couplings"]["stage_starts"])
    keys = ["mlp", "attention"] + (["indexer"] if report["index_topk"] else [])
    text = Text()
    for first in range(0, len(layers), _LAYERS_A_ROW):
        row = layers[first : first + _LAYERS_A_ROW]
        ruler = "".join(
            str(layer["index"]).ljust(_RULER) for layer in row if layer["index"] % _RULER == 0
        )
        text.append(f"{'layer':<10}{ruler}\n", style="dim")
        for key in keys:
            text.append(f"{key:<10}", style="bold")
            text.append("".join(_MARKS[key][layer[key]] for layer in row) + "\n")
        if report["couplings"]["known"]:
            text.append(f"{'start':<10}", style="bold")
            marks = "".join("^" if layer["index"] in starts else " " for layer in row)
            text.append(marks.rstrip() + "\n", style="green")
        text.append("\n")
    shown = [*keys, "start"] if report["couplings"]["known"] else keys
    for key in shown:
        text.append(f"{key:<10}{_LEGEND[key]}\n", style="dim")
    return text
