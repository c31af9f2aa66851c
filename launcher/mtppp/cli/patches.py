"""`mtppp patches`"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

import click

from mtppp.errors import ConfigurationError
from mtppp.model.config import find_config
from mtppp.model.facts import read_facts
from mtppp_patches.engine_spec import Device, EngineSpec, Speculative
from mtppp_patches.patch import Patch
from mtppp_patches.registry import PATCHES
from mtppp_patches.releases import RELEASES
from mtppp_patches.support import (
    IN_PLACE,
    IN_PLACE_MEANS,
    Evidence,
    admissible,
    in_spans,
    span,
    support,
)

# Of what an engine may have: each of these wants a patch, whatever the family.
_EVERYTHING: Mapping[str, Any] = {"invariants": "count", "placement": {}}


@click.command(name="patches")
@click.option("--vllm", "release", help="Only this release, such as 0.32.0.")
@click.option("--model", help="Only what this model may need: DIR, or a hub id.")
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
    concerned = [patch for patch in PATCHES if _concerns(patch, asked, family)]
    report = {
        "updated": support().updated,
        "patches": [_patch(patch, asked) for patch in concerned],
        "releases": list(_verdicts(asked, family)),
        "limits": list(_limits(asked)),
        "other_methods": list(_other_methods(asked)),
    }
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report, asked)))


def _concerns(patch: Patch, asked: list[str], family: str | None) -> bool:
    """Whether it is for one of these releases and, if a family is given, something of that."""
    if family is None:
        return any(release in patch.releases for release in asked)
    return any(
        patch.needed(replace(_spec(release, family), device=device, **_EVERYTHING))
        for release in asked
        for device in get_args(Device)
    )


def _patch(patch: Patch, asked: list[str]) -> dict[str, Any]:
    concerned = [release for release in asked if release in patch.releases]
    shown = {release: support().shown(patch.name, release) for release in concerned}
    return {
        "name": patch.name,
        "why": patch.why,
        "releases": concerned,
        "obsolete_by": patch.obsolete_by,
        "fate": patch.fate,
        "shown": {
            release: {"level": row.level, "in_place": row.in_place, "record": row.record}
            for release, row in shown.items()
        },
        "replaces": [
            target.name
            for target in patch.targets
            if target.replace is not None and any(map(target.exists_in, concerned))
        ],
    }


def _spec(release: str, model_type: str) -> EngineSpec:
    return EngineSpec(
        release=release,
        model_type=model_type,
        tensor=2,
        pipeline=2,
        speculative=Speculative("mtp", 3),
    )


def _other_methods(releases: list[str]) -> Iterator[dict[str, Any]]:
    """What speculation of other kinds does over stages; it is refused."""
    for row in support().other_methods:
        if concerned := [release for release in releases if release in row.releases]:
            yield {"methods": list(row.methods), "releases": concerned, "does": row.does}


def _limits(releases: list[str]) -> Iterator[dict[str, Any]]:
    """What works otherwise over stages than without."""
    for row in support().limits:
        if concerned := [release for release in releases if release in row.releases]:
            yield {"releases": concerned, "what": row.what}


def _verdicts(releases: list[str], family: str | None) -> Iterator[dict[str, Any]]:
    for release in releases:
        listed = support().releases.get(release, {})
        for model_type in [family] if family else sorted(listed):
            verdict = admissible(_spec(release, model_type))
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
                "not_shown": ""
                if verdict.allowed
                else support().why_not_shown(release, model_type),
            }


def _labels(patch: Mapping[str, Any]) -> dict[str, str]:
    """Release -> how far the patch was shown there."""
    return {release: support().shown(patch["name"], release).label for release in patch["releases"]}


def _lines(report: dict[str, Any], asked: list[str]) -> Iterator[str]:
    for patch in report["patches"]:
        yield f"{patch['name']}  ({span(patch['releases'])})"
        yield from _below(patch["why"])
        yield from _below(patch["fate"])
        yield from _below(f"evidence: {in_spans(_labels(patch))}")
    if any(IN_PLACE in _labels(patch).values() for patch in report["patches"]):
        yield from _folded(f"{IN_PLACE}: {IN_PLACE_MEANS}")
    yield ""
    for row in report["releases"]:
        verdict = "allowed" if row["allowed"] else "refused"
        yield f"vLLM {row['release']}  {row['family']}  {verdict}"
        if not row["allowed"]:
            yield from _below(row["reason"])
            yield from _below(row["not_shown"])
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
    for why, releases in _grouped(rest):
        yield from _below(f"{', '.join(releases)}: {why}")
    if report["limits"]:
        yield ""
        yield "with MTP over stages:"
    for row in report["limits"]:
        yield from _below(f"{row['what']} ({span(row['releases'])})")
    yield ""
    yield from _folded("speculation of other kinds over stages is refused; by vLLM's sources:")
    for row in report["other_methods"]:
        yield from _below(f"{', '.join(row['methods'])} ({span(row['releases'])}): {row['does']}")
    yield f"as of {report['updated']}"


def _grouped(releases: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Why nothing was shown on these releases, where that is known, each reason once."""
    for row in support().not_shown:
        concerned = [release for release in releases if release in row.releases]
        if concerned and not row.families:
            yield row.why, concerned


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
