"""One verification from its arguments to its verdict, its files and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mtppp.errors import ConfigurationError, Inconclusive, MtpppError
from mtppp.verify import measure, run
from mtppp.verify import stored as stored_baseline
from mtppp.verify.evidence import evidence_by_stored, evidence_of
from mtppp.verify.prompts import Prompt, coverage, fingerprint, own_set
from mtppp.verify.record import SCHEMA, Record, manifest_of
from mtppp.verify.report import report
from mtppp.verify.result import result, write
from mtppp.verify.run import Progress, Settings
from mtppp.verify.servers import Server, same_server
from mtppp.verify.tiers import HARD_GAP, TIERS, Tier
from mtppp.verify.verdict import Direction, Evidence, Verdict, judge

STORED = "baseline"

_JUDGED = "judged"  # the note of a verdict that rests on a complete record


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
        ConfigurationError: a server cannot be asked as the arguments say, or both are the same.
    """
    if baseline and same_server(candidate, baseline):
        raise ConfigurationError(
            f"candidate and baseline are the same server, {baseline.url}",
            hint="name another as the baseline; without one the candidate judges itself, and the"
            " verdict says what that cannot see",
        )
    servers = {server.role: server.url for server in (candidate, baseline) if server}
    described = manifest(settings, prompts, **servers)
    record = _unfinished(Record.open(directory, described), _JUDGED)
    asking = partial(
        run.run,
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
    record = _unfinished(Record.open(directory, described), "asked")
    run.run(
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
    _unfinished(record, _JUDGED)
    _same_prompts(exported, described, prompts)
    asking = partial(
        run.run,
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


def record_baseline(
    directory: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    baseline: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> str:
    """Keep what a baseline answers, for `verify_by_stored`; what it holds, in a few words.

    Raises:
        ConfigurationError: the server cannot be asked as the arguments say.
        Inconclusive: it did not answer as it should, or disagrees with itself.
    """
    described = manifest(settings, prompts, kind=STORED, baseline=baseline.url)
    record = _unfinished(Record.open(directory, described), "null")
    run.record_baseline(
        record, settings, prompts, baseline=baseline, about=about, progress=progress
    )
    gaps = [gap for scores in record.scores["null"].values() for gap in scores.gap]
    outliers = sum(gap > HARD_GAP for gap in gaps)
    if outliers > max(2, 10 * settings.tier.token_margin * len(gaps)):
        raise Inconclusive(
            f"{outliers} of the {len(gaps)} tokens that it emits are none that it would emit when"
            " scored: this is no baseline",
            hint="restart it without speculative decoding, or take another server",
        )
    null = measure.quantiles(gaps)
    today = datetime.now(UTC).date().isoformat()
    record.note("null", {"tokens": len(gaps), "outliers": outliers, "date": today, **null})
    return f"{len(record.answers['null'])} answers, {len(gaps)} tokens, {outliers} outliers"


def verify_by_stored(
    directory: Path,
    stored: Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    candidate: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> Outcome:
    """Compare a server with a baseline that was recorded.

    Args:
        prompts: those that the baseline was recorded with.

    Raises:
        ConfigurationError: `stored` is no complete baseline, or of other prompts.
    """
    baseline, of = _stored_baseline(stored)
    _same_prompts(stored, of, prompts)
    digest = stored_baseline.digest(stored)
    described = manifest(settings, prompts, candidate=candidate.url, stored_baseline=digest)
    record = _unfinished(Record.open(directory, described), _JUDGED)
    identity = baseline.notes["identity/baseline"]
    recorded = date.fromisoformat(baseline.notes["null"]["date"])
    days = (datetime.now(UTC).date() - recorded).days
    about_baseline = {**identity["about"], "recorded": f"{recorded}, {days} days ago"}
    record.note("identity/baseline", {**identity, "about": about_baseline})
    asking = partial(
        run.run_stored,
        record,
        settings,
        prompts,
        baseline,
        candidate=candidate,
        about=about,
        progress=progress,
    )
    return _concluded(asking, record, settings, described, stored=baseline)


def _unfinished(record: Record, last: str) -> Record:
    """The record, to go on with.

    Of a finished one nothing would be asked again: what was found then would be said of whatever
    answers at the URL now.

    Args:
        last: the note with which it is finished.
    """
    if last in record.notes:
        raise ConfigurationError(
            f"{record.directory} holds a run that is finished",
            hint="its results stay there; begin anew in another directory",
        )
    return record


def _same_prompts(directory: Path, of: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    if of["prompts_sha256"] != fingerprint(prompts):
        raise ConfigurationError(
            f"{directory} has answers to other prompts",
            hint="give the same --prompts as when it was made",
        )


def _stored_baseline(directory: Path) -> tuple[Record, dict[str, Any]]:
    record, of = Record.read(directory)
    if of.get("kind") != STORED or "null" not in record.notes:
        raise ConfigurationError(
            f"{directory} is no complete baseline",
            hint=f"record it: mtppp baseline record --baseline-url URL -o {directory}",
        )
    return record, of


def check_baseline(directory: Path) -> Tier:
    """The tier of a stored baseline that a launch can verify by.

    Raises:
        ConfigurationError: it is not complete, or of other prompts than the set.
    """
    of = _stored_baseline(directory)[1]
    tier = _tier_of(directory, of)
    try:
        _same_prompts(directory, of, own_set(tier.requests))
    except ConfigurationError as error:
        error.hint = (
            "a launch asks mtppp's own set: record it without --prompts; by this one verifies"
            f" `mtppp verify --baseline {directory} --prompts FILE`"
        )
        raise
    return tier


def recorded_tier(directory: Path) -> Tier:
    """The tier of an export or of a stored baseline."""
    return _tier_of(directory, manifest_of(directory))


def _tier_of(directory: Path, of: Mapping[str, Any]) -> Tier:
    if of["tier"] not in TIERS:
        raise ConfigurationError(
            f"{directory} is of a tier that is not known, {of['tier']}",
            hint=f"known are {', '.join(TIERS)}: is it of another version of mtppp?",
        )
    return TIERS[of["tier"]]


def undecided(tier: Tier, error: MtpppError) -> Outcome:
    """What is to be said where nothing could be asked at all."""
    evidence = _nothing_found(tier, error, "mend it, and verify again")
    verdict = judge(evidence)
    lines = report(verdict, evidence, identities={}, coverage=coverage([]), worst=(), files=())
    return Outcome(verdict, {}, lines)


def _nothing_found(tier: Tier, error: MtpppError, otherwise: str) -> Evidence:
    return Evidence(
        tier=tier,
        pairs=(),
        above=HARD_GAP,
        control=None,
        alone=Direction(0, 0),
        reasons=(error.message,),
        advice=error.hint or otherwise,
    )


def _concluded(
    asking: Callable[[], None],
    record: Record,
    settings: Settings,
    described: Mapping[str, Any],
    *,
    stored: Record | None = None,
) -> Outcome:
    started = time.monotonic()
    interrupted: Inconclusive | None = None
    try:
        asking()
    except Inconclusive as error:
        interrupted = error
    return conclude(
        record,
        settings,
        described,
        seconds=time.monotonic() - started,
        interrupted=interrupted,
        stored=stored,
    )


def conclude(
    record: Record,
    settings: Settings,
    described: Mapping[str, Any],
    *,
    seconds: float,
    interrupted: Inconclusive | None,
    stored: Record | None = None,
) -> Outcome:
    """Judge a record and write what comes of it.

    Args:
        stored: the baseline, if it is one that was recorded.
        interrupted: why the record is not complete; then nothing but that is concluded.
    """
    if interrupted is None:
        same_model = settings.same_model
        evidence = (
            evidence_by_stored(record, stored, settings.tier, same_model=same_model)
            if stored
            else evidence_of(record, settings.tier, same_model=same_model)
        )
        verdict = judge(evidence)
    else:
        otherwise = f"mend it, and go on with -o {record.directory}"
        evidence = _nothing_found(settings.tier, interrupted, otherwise)
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
    if interrupted is None and not evidence.reasons:
        record.note(_JUDGED, {"verdict": verdict.outcome})
    lines = report(
        verdict,
        evidence,
        identities=identities,
        coverage=covered,
        worst=worst,
        files=files,
    )
    return Outcome(verdict, content, lines)
