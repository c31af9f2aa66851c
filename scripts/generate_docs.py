#!/usr/bin/env python3
"""Writes the reference pages of docs/ from the sources they describe.

scripts/generate_docs.py           writes them
scripts/generate_docs.py --check   exit status 1 when one is not as the sources say
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("launcher", "patches", "scripts")]

from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from mtppp.cluster.managed import MANAGED_FLAGS, reserved_variables  # noqa: E402
from mtppp.cluster.schema import Cluster  # noqa: E402
from mtppp.phases.status import DeploymentStatus, NodeStatus  # noqa: E402
from mtppp.plan.plan import Plan  # noqa: E402
from mtppp_patches.patch import Patch  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from mtppp_patches.releases import RELEASES  # noqa: E402
from mtppp_patches.support import (  # noqa: E402
    IN_PLACE,
    IN_PLACE_MEANS,
    Family,
    span,
    support,
)
from relay_matrix import SCENARIOS  # noqa: E402
from support_release import circumstances  # noqa: E402

EXAMPLE = "cluster_configs/glm-5.2-fp8-2x8-h100.yaml"

_NAMES = {str: "text", int: "number", float: "number", bool: "true or false", Path: "path"}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not _is_current(path, text)]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not up to date' if check else 'written'}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if check and stale else 0


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    return {
        ROOT / "docs/cluster-yaml.md": cluster_page(),
        ROOT / "docs/vllm-support.md": support_page(),
        ROOT / "docs/json.md": json_page(),
    }


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def json_page() -> str:
    """What commands print with --json, from the dataclasses that become it."""
    lines = [
        "# JSON output",
        "",
        "<!-- Made by scripts/generate_docs.py from launcher/mtppp; do not edit. -->",
        "",
        "With `--json`, a command prints one JSON value on standard output, and all else on",
        "standard error; its exit status is the same as without. Keys may be added.",
        "",
        "## mtppp status --json",
        "",
        *_fields(DeploymentStatus),
        "",
        "Each of `nodes`:",
        "",
        *_fields(NodeStatus),
        "",
        "Each of `ranks` is what that rank wrote from inside its process: among others `rank`,",
        "`stage`, `tensor_rank`, `node`, `layers`, `drafter`, `runner`, `executor`, `vllm`,",
        "`async_scheduling`, `plugins`, `patches`, and `environment`, with hashes for values.",
        "",
        "## mtppp plan --json",
        "",
        "`plan` is the Plan, of these keys; beside it `partition`, `memory`, `evidence`,",
        "`refusals`, `defaults`, `times`, `warnings`, `unknowns` and `placeholders`",
        "(what `mtppp import` left to be filled in).",
        "",
        *_fields(Plan),
        "",
        "## mtppp list --json",
        "",
        "A list with `name`, `file`, `model` and `hosts` of each deployment.",
        "",
        "## mtppp patches --json",
        "",
        "`patches`, each with what it replaces and `shown`, its evidence by release; `releases`, a",
        "verdict with evidence for each release and family; `limits`, what is otherwise with MTP",
        "over stages than without; `other_methods`, what speculation of other kinds does over",
        "stages; `updated`.",
        "",
    ]
    return "\n".join(lines)


def _fields(record: type) -> Iterator[str]:
    """The fields of a dataclass with the meanings that its docstring gives them."""
    section = str(record.__doc__).partition("Attributes:")[2].partition("\n\n")[0]
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n {8}(?=\S)", section):
        names, _, meaning = entry.partition(":")
        text = " ".join(meaning.split()).removesuffix(".")
        meanings |= {name.strip(): text for name in names.split(",")}
    return _table(
        ("key", "meaning"),
        ((f"`{field.name}`", meanings[field.name]) for field in dataclasses.fields(record)),
    )


def support_page() -> str:
    """What is patched and proven, from the table that plugin and launcher decide by."""
    table = support()
    lines = [
        "# vLLM releases, patches and evidence",
        "",
        "<!-- Made by scripts/generate_docs.py from patches/mtppp_patches; do not edit. -->",
        "",
        f"As of {table.updated}. `mtppp patches` prints the same; `--model`, `--vllm` narrow it.",
        "What is not listed here is refused under pipeline parallelism. A combination is allowed",
        "when its decoding has *engine* evidence on that release (a real engine ran and another",
        "scored its tokens) and every patch that its model needs beyond that at least *class*",
        "evidence (what it concerns in the real classes ran, in a process group where ranks meet).",
        "",
        "## Families, by release",
        "",
        *_table(("release", "family", "decoding", "evidence", "note"), _families()),
        "",
        "## Records",
        "",
        "What was run, in `patches/evidence`; a row above claims no more than its record shows.",
        "",
        *_table(("record", "date", "shows"), _records()),
        "",
        "## Patches",
        "",
        *_table(("patch", "releases", "why", "until"), (_patch_row(p) for p in PATCHES)),
        "",
        "How far each was shown by itself, release by release. *Engine*: engines ran with it, and",
        f"what it is for was right. *{IN_PLACE.capitalize()}*: {IN_PLACE_MEANS}.",
        "*Class*: see above. *Config*: real configuration classes were made. *Read*: the sources",
        "that it replaces and leans on were read; they are verified before it is put in place.",
        "",
        *_table(("patch", *RELEASES), (_levels(p) for p in PATCHES)),
        "",
        "## Not shown, and why",
        "",
        *_table(("releases", "families", "why"), _not_shown()),
        "",
        "## With MTP over stages, otherwise than without",
        "",
        *_table(("releases", "what"), ((span(row.releases), row.what) for row in table.limits)),
        "",
        "## Other speculative methods",
        "",
        "What vLLM does with them under pipeline parallelism, by its sources. mtppp refuses them",
        "all there (`speculative_method`): nothing of theirs has been run.",
        "",
        *_table(
            ("methods", "releases", "what vLLM does"),
            ((", ".join(row.methods), span(row.releases), row.does) for row in table.other_methods),
        ),
        "",
        "## Refused",
        "",
        *_table(
            ("code", "reason", "way out", "can be overridden"),
            (
                (f"`{r.code}`", r.reason, r.way_out, "yes" if r.overridable else "no")
                for r in table.refusals.values()
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _families() -> Iterator[tuple[str, ...]]:
    for release in RELEASES:
        for family in support().releases.get(release, {}).values():
            yield release, f"`{family.model_type}`", family.decode, _evidence(family), family.note


def _records() -> Iterator[tuple[str, ...]]:
    for path in sorted((ROOT / "patches/evidence").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        yield f"`{path.name}`", record["date"], "; ".join(_shown(record))


def _shown(record: dict[str, Any]) -> Iterator[str]:
    """What a record shows: of classes, of engines, or of configurations."""
    for patch, families in record.get("shows", {}).items():
        if families:
            engines = "engine of " if record["level"] == "engine" else ""
            yield f"{patch}: {engines}{', '.join(families)}"
    if "arms" in record:
        arms = [
            name for name, arm in record["arms"].items() if arm["right"] and arm["pipeline"] > 1
        ]
        yield f"engine: {record['model_type']} in {record['dtype']}, right: {', '.join(arms)}"
        ran = record.get("scenarios", [name for name in SCENARIOS if name != "one_left"])
        if lacking := [name for name in SCENARIOS if name not in ran]:
            few = len(ran) < len(lacking)
            yield f"{', '.join(ran)} alone" if few else f"without {', '.join(lacking)}"
        yield from circumstances(record)
    if record.get("release") != (base := record.get("compiled_parts", record.get("release"))):
        yield f"on the compiled parts of {base}: this release has no build for CPUs"
    if releases := record.get("releases"):
        cases = [family for arms in releases.values() for family in arms["patched"].items()]
        passing = {name for name, outcome in cases if outcome == "passes"}
        failing = {name for name, outcome in cases if outcome not in ("passes", "unknown")}
        yield (
            f"config: {len(releases)} releases, with and without `config_gate`, each with the"
            f" families with MTP that it knows, of {', '.join(sorted(passing))}"
        )
        if failing:
            yield f"not passing with it on some release: {', '.join(sorted(failing))}"


def _evidence(family: Family) -> str:
    return "; ".join(
        f"{what}: {proof.for_family(family.model_type)}, {proof.date}, {proof.record}"
        for what, proof in family.evidence.items()
    )


def _patch_row(patch: Patch) -> tuple[str, ...]:
    first, last = patch.releases[0], patch.releases[-1]
    return f"`{patch.name}`", f"{first} to {last}", patch.why, patch.fate


def _levels(patch: Patch) -> tuple[str, ...]:
    levels = (
        support().shown(patch.name, release).label if release in patch.releases else ""
        for release in RELEASES
    )
    return f"`{patch.name}`", *levels


def _not_shown() -> Iterator[tuple[str, ...]]:
    for row in support().not_shown:
        families = ", ".join(f"`{family}`" for family in row.families) or "all"
        yield span(row.releases), families, row.why


def cluster_page() -> str:
    """The reference of cluster.yaml, from the schema."""
    lines = [
        "# cluster.yaml",
        "",
        "<!-- Made by scripts/generate_docs.py from launcher/mtppp/cluster; do not edit. -->",
        "",
        f"{Cluster.__doc__} Unknown and duplicate keys are errors, and all errors of a file are "
        "shown at once.",
        "Paths on your side are relative to the file; `~/` is your home directory there, and the "
        "home",
        "directory on the node in paths on nodes. Ready files to begin with are in "
        "`cluster_configs/`;",
        "`mtppp init` asks a few questions and writes one, `mtppp import` makes one of a "
        "`vllm serve`",
        "command.",
        "",
        *_sections(),
        "## Flags that are not for serve.args",
        "",
        "mtppp sets these itself, or the file has a place for them, or mtppp could not ask the "
        "server:",
        "",
        *_table(("flag", "instead"), ((f"`--{flag}`", why) for flag, why in MANAGED_FLAGS.items())),
        "",
        "## Variables that are not for runtime.env",
        "",
        *_table(("variable", "why"), ((f"`{n}`", why) for n, why in reserved_variables().items())),
        "",
        "## An example",
        "",
        f"`{EXAMPLE}`:",
        "",
        "```yaml",
        (ROOT / EXAMPLE).read_text(encoding="utf-8").rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[str]:
    """A table for the top of the file, then one for each section in it."""
    yield from _section("The file", Cluster)
    for name, field in Cluster.model_fields.items():
        section = _model_in(field.annotation)
        if section is not None:
            yield from _section(f"{name}{'[]' if _is_list(field.annotation) else ''}", section)


def _section(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    if model is not Cluster:
        yield from (str(model.__doc__).strip(), "")
    yield from _table(
        ("key", "value", "default", ""),
        (
            (f"`{name}`", type_name(field.annotation), _default(field), field.description or "")
            for name, field in model.model_fields.items()
        ),
    )
    yield ""


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def type_name(annotation: Any) -> str:
    """A type as a person calls it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, types.UnionType):
        parts = [type_name(part) for part in arguments if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is not None:
        return f"list of {type_name(arguments[0])}" if _is_list(annotation) else "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or holds a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)


def _default(field: FieldInfo) -> str:
    # A node's `gpus` is completed from elsewhere in the file before it is validated.
    if field.is_required():
        return "" if "by default" in (field.description or "") else "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value == "" or isinstance(value, BaseModel) or value in ((), {}):
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    sys.exit(main())
