"""One verification from its arguments to its verdict, its files and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mtppp.errors import ConfigurationError, Inconclusive
from mtppp.verify.evidence import evidence_of
from mtppp.verify.prompts import Prompt, coverage, fingerprint
from mtppp.verify.record import SCHEMA, Record
from mtppp.verify.report import report
from mtppp.verify.result import result, write
from mtppp.verify.run import Progress, Settings, run
from mtppp.verify.servers import Server
from mtppp.verify.tiers import TIERS, Tier
from mtppp.verify.verdict import Direction, Evidence, Verdict, judge


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a verification.

    Attributes:
        result: the content of `result.json`.
        lines: the report.
    """

    verdict: Verdict
    result: dict[str, Any]
    lines: list[str]


def manifest(settings: Settings, prompts: Sequence[Prompt], **servers: str) -> dict[str, Any]:
    """What a record is of; another run does not go on with it."""
    return {
        "schema": SCHEMA,
        "tier": settings.tier.name,
        "prompts": len(prompts),
        "prompts_sha256": fingerprint(prompts),
        **servers,
    }


def verify(
    directory: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    candidate: Server,
    baseline: Server | None,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> Outcome:
    """Compare two servers; without a baseline, the candidate with itself.

    Raises:
        ConfigurationError: a server cannot be asked as the arguments say.
    """
    servers = {server.role: server.url for server in (candidate, baseline) if server}
    described = manifest(settings, prompts, **servers)
    record = Record.open(directory, described)
    asking = partial(
        run,
        record,
        settings,
        prompts,
        candidate=candidate,
        baseline=baseline,
        judging="baseline" if baseline else "candidate",
        about=about,
        progress=progress,
    )
    return _concluded(asking, record, settings, described)


def export(
    directory: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    candidate: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> int:
    """Only have the candidate answer, to be judged elsewhere; the number of answers.

    Raises:
        ConfigurationError: the server cannot be asked as the arguments say.
        Inconclusive: it did not answer as it should.
    """
    described = manifest(settings, prompts, candidate=candidate.url)
    record = Record.open(directory, described)
    run(
        record,
        settings,
        prompts,
        candidate=candidate,
        baseline=None,
        judging="nobody",
        about=about,
        progress=progress,
    )
    return len(record.answers["candidate"])


def score(
    exported: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    baseline: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> Outcome:
    """Have a baseline judge what `export` wrote; the rest goes into the same directory.

    Args:
        prompts: those of the export.

    Raises:
        ConfigurationError: there is no export, or it is of other prompts.
    """
    record, described = Record.read(exported)
    if described["prompts_sha256"] != fingerprint(prompts):
        raise ConfigurationError(
            f"{exported} answers other prompts", hint="give the same --prompts as to the export"
        )
    asking = partial(
        run,
        record,
        settings,
        prompts,
        candidate=None,
        baseline=baseline,
        judging="baseline",
        about=about,
        progress=progress,
    )
    return _concluded(asking, record, settings, described)


def exported_tier(exported: Path) -> Tier:
    """The tier of an export."""
    return TIERS[Record.read(exported)[1]["tier"]]


def _concluded(
    asking: Callable[[], None],
    record: Record,
    settings: Settings,
    described: Mapping[str, Any],
) -> Outcome:
    started = time.monotonic()
    interrupted: Inconclusive | None = None
    try:
        asking()
    except Inconclusive as error:
        interrupted = error
    return conclude(
        record, settings, described, seconds=time.monotonic() - started, interrupted=interrupted
    )


def conclude(
    record: Record,
    settings: Settings,
    described: Mapping[str, Any],
    *,
    seconds: float,
    interrupted: Inconclusive | None,
) -> Outcome:
    """Judge a record and write what comes of it.

    Args:
        interrupted: why the record is not complete; then nothing but that is concluded.
    """
    if interrupted is None:
        evidence = evidence_of(record, settings.tier, same_model=settings.same_model)
        verdict = judge(evidence)
    else:
        evidence = Evidence(
            tier=settings.tier,
            pairs=(),
            above=1.0,
            control=None,
            alone=Direction(0, 0),
            reasons=(interrupted.message,),
            advice=interrupted.hint or f"mend it, and go on with -o {record.directory}",
        )
        verdict = judge(evidence)
    identities = {
        key.removeprefix("identity/"): note
        for key, note in record.notes.items()
        if key.startswith("identity/")
    }
    covered = coverage([(kind, len(ids)) for kind, ids in record.prompts.values()])
    worst = record.notes.get("worst", {}).get("tokens", [])
    content = result(
        verdict,
        evidence,
        identities=identities,
        prompts={
            "count": described["prompts"],
            "sha256": described["prompts_sha256"],
            **covered,
        },
        worst=worst,
        seconds=seconds,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    files = write(record.directory, content)
    lines = report(
        verdict,
        evidence,
        identities=identities,
        coverage=covered,
        worst=worst,
        files=files,
    )
    return Outcome(verdict, content, lines)
