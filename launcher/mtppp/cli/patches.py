"""`mtppp patches`"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from mtppp.errors import ConfigurationError
from mtppp.model.config import find_config
from mtppp.model.facts import read_facts
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import Patch
from mtppp_patches.registry import PATCHES
from mtppp_patches.releases import RELEASES
from mtppp_patches.support import Evidence, admissible, support


@click.command(name="patches")
@click.option("--vllm", "release", help="Only this release, such as 0.32.0.")
@click.option("--model", help="Only what this model needs: DIR, or a hub id.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
def command(release: str | None, model: str | None, as_json: bool) -> None:
    """Say what mtppp changes inside vLLM, and what is proven on which release.

    Verdicts are for pipeline parallelism with MTP, TP2 x PP2, the layout that meets every fault.
    """
    if release is not None and release not in RELEASES:
        raise ConfigurationError(
            f"vLLM {release} is not known", hint=f"known are {', '.join(RELEASES)}"
        )
    family = None if model is None else read_facts(find_config(model).values).model_type
    asked = [release] if release else list(RELEASES)
    report = {
        "updated": support().updated,
        "patches": [_patch(patch, release) for patch in PATCHES if _concerns(patch, release)],
        "releases": list(_verdicts(asked, family)),
    }
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report, asked)))


def _concerns(patch: Patch, release: str | None) -> bool:
    return release is None or release in patch.releases


def _patch(patch: Patch, release: str | None) -> dict[str, Any]:
    return {
        "name": patch.name,
        "why": patch.why,
        "releases": [release] if release else list(patch.releases),
        "obsolete_by": patch.obsolete_by,
        "fate": patch.fate,
        "replaces": [
            target.name
            for target in patch.targets
            if target.replace is not None and (release is None or target.exists_in(release))
        ],
    }


def _verdicts(releases: list[str], family: str | None) -> Iterator[dict[str, Any]]:
    for release in releases:
        listed = support().releases.get(release, {})
        for model_type in [family] if family else sorted(listed):
            spec = EngineSpec(
                release=release,
                model_type=model_type,
                tensor=2,
                pipeline=2,
                speculative=Speculative("mtp", 3),
            )
            verdict = admissible(spec)
            yield {
                "release": release,
                "family": model_type,
                "allowed": verdict.allowed,
                "reason": verdict.reason,
                "way_out": verdict.way_out,
                "patches": list(verdict.patches),
                "evidence": {
                    what: {
                        "level": found.level,
                        "on": found.on,
                        "date": found.date,
                        "record": found.record,
                    }
                    for what, found in verdict.evidence.items()
                },
                "note": listed[model_type].note if model_type in listed else "",
            }


def _lines(report: dict[str, Any], asked: list[str]) -> Iterator[str]:
    for patch in report["patches"]:
        span = patch["releases"]
        yield f"{patch['name']}  ({span[0]}{f' to {span[-1]}' if len(span) > 1 else ''})"
        yield from _below(patch["why"])
        yield from _below(patch["fate"])
    yield ""
    for row in report["releases"]:
        verdict = "allowed" if row["allowed"] else "refused"
        yield f"vLLM {row['release']}  {row['family']}  {verdict}"
        if not row["allowed"]:
            yield from _below(row["reason"])
        for what, shown in row["evidence"].items():
            proof = Evidence(**shown)
            yield from _below(
                f"{what}: {proof.for_family(row['family'])}, {proof.date}, {proof.record}"
            )
        if row["note"]:
            yield from _below(row["note"])
    proven = {row["release"] for row in report["releases"]}
    rest = [release for release in asked if release not in proven]
    if rest:
        yield from _folded(
            f"nothing is proven on {', '.join(rest)}: refused under pipeline parallelism"
        )
    yield f"as of {report['updated']}"


def _below(text: str) -> list[str]:
    return _folded(text, "    ")


def _folded(text: str, indent: str = "") -> list[str]:
    """At the terminal's width; what is to be copied stays whole."""
    return textwrap.wrap(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
