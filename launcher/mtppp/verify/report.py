"""What a person reads: the verdict first, then the figures it rests on, then what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtppp.verify.power import Power
from mtppp.verify.verdict import Control, Evidence, Figures, Verdict, percent

WIDTH = 78
_LABEL = 11


def report(
    verdict: Verdict,
    evidence: Evidence,
    *,
    identities: Mapping[str, Mapping[str, Any]],
    coverage: Mapping[str, Any],
    worst: Sequence[Mapping[str, Any]],
    files: Sequence[str],
) -> list[str]:
    """The lines of a report, at most 78 columns wide.

    Args:
        identities: role -> what the server said of itself.
        coverage: of the prompts.
        worst: tokens with the largest gaps, with what stands before them.
        files: what was written.
    """
    lines = [f"{verdict.headline}  ({evidence.tier.name} tier)"]
    for why in verdict.why:
        lines += _wrapped("", why)
    for warning in verdict.warnings:
        lines += _wrapped("warning", warning)
    if figures := list(_figures(verdict, evidence)):
        lines += ["", *figures]
    if worst:
        lines += ["", *_worst(worst)]
    if verdict.next_steps:
        lines.append("")
        for step in verdict.next_steps:
            lines += _wrapped("next", step)
    lines.append("")
    for role, identity in identities.items():
        lines += _wrapped(role, _identity(identity))
    if coverage["kinds"]:
        lines += _wrapped("prompts", _coverage(coverage))
    for file in files:
        lines += _wrapped("written", file)
    return lines


def _figures(verdict: Verdict, evidence: Evidence) -> Iterator[str]:
    figures = verdict.figures
    if figures.requests:
        yield from _wrapped("tokens", _tokens(figures, evidence))
        null = "" if evidence.itself else f" (the baseline's own: {figures.null_ruined})"
        yield from _wrapped(
            "requests",
            f"{figures.ruined} of {figures.requests} ruined{null}; p = {figures.p_requests:.2g}",
        )
        if (figures.may_be_ruined, figures.bounded) != (figures.ruined, figures.requests):
            unknown = "confirmed or not tried" if evidence.forced is None else "the rest not known"
            yield from _wrapped(
                " ",
                f"for the bound, above 1 nat and {unknown}: {figures.may_be_ruined} of"
                f" {figures.bounded}",
            )
    if evidence.forced is not None:
        yield from _wrapped(
            "forced",
            f"given the baseline's answers, the candidate objects to {figures.forced_outliers} of"
            f" {figures.forced_tokens} tokens; p = {figures.p_forced:.2g}",
        )
    if evidence.known:
        right, asked = evidence.known
        yield from _wrapped("known", f"{right} of {asked} well-known texts gone on with rightly")
    if evidence.sampled:
        yield from _wrapped(
            "sampled",
            f"{evidence.sampled.tokens} tokens at temperature 1; p = {evidence.sampled.p:.2g}",
        )
        yield from _wrapped(
            " ",
            "; ".join(
                f"were {share * 100:g} % of them replaced: FAIL with {_percent(chance)}"
                for share, chance in evidence.sampled.power.items()
            ),
        )
    if evidence.control:
        yield from _wrapped("control", _control(evidence.control, figures))
    label = "power"
    for what, powers in (
        ("tokens damaged", verdict.token_power),
        ("requests ruined", verdict.request_power),
    ):
        for share, power in powers.items():
            yield from _wrapped(label, _power(f"{share * 100:g} % of {what}", power))
            label = " "
    if figures.requests:
        yield from _wrapped("drafts", _drafts(verdict))


def _tokens(figures: Figures, evidence: Evidence) -> str:
    found = f"{figures.outliers} of {figures.tokens} have a gap above {evidence.above:.3g} nat"
    if figures.null_tokens:
        found += f" (the baseline's own: {figures.null_outliers} of {figures.null_tokens}"
        if evidence.alone.tokens:
            found += f"; one by one {evidence.alone.outliers} of {evidence.alone.tokens}"
        found += ")"
    return f"{found}; p = {figures.p_tokens:.2g}"


def _control(control: Control, figures: Figures) -> str:
    seen = ", ".join(
        f"{control.seen[share]} of {made} for {share * 100:g} %"
        for share, made in control.made.items()
    )
    ruined = f"; requests {control.ruined_seen} of {control.ruined_made}"
    return (
        f"damaged on purpose and seen: tokens {seen}{ruined if control.ruined_made else ''}."
        f" Sensitivity at least {percent(figures.sensitivity, 0)}"
    )


def _power(damage: str, power: Power) -> str:
    return f"{damage}: FAIL with {_percent(power.fails)}, no PASS with {_percent(power.not_passed)}"


def _percent(chance: float) -> str:
    if chance > 0.9995:
        return "more than 99.9 %"
    return percent(chance, 1)


def _drafts(verdict: Verdict) -> str:
    acceptance = verdict.acceptance
    text = f"{acceptance.outcome}: {acceptance.why}"
    if acceptance.rates:
        text += f"; accepted by position {_rates(acceptance.rates)}"
    if acceptance.reference:
        text += f", the baseline's {_rates(acceptance.reference)}"
    return text


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate * 100:.0f} %" for rate in rates)


def _worst(worst: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Worst tokens, with what stands before them:"
    for token in worst:
        yield from _wrapped(
            f"{token['gap']:.1f} nat",
            f"{_shown(token['before'], 36)} came {_shown(token['token'], 14)}, wanted"
            f" {_shown(token['wanted'], 14)} ({token['key']}, token {token['position'] + 1})",
        )


def _shown(text: str, limit: int) -> str:
    """The end of a text on one line, quoted."""
    shown = repr(text)[1:-1]
    return f'"{"…" + shown[-limit:] if len(shown) > limit else shown}"'


def _identity(identity: Mapping[str, Any]) -> str:
    release = f", vLLM {identity['release']}" if identity.get("release") else ""
    known = identity.get("about", {})
    about = "".join(
        # A Plan's evidence begins with the word.
        f", {value}" if key == "evidence" else f", {key} {value}"
        for key, value in known.items()
        if key != "argv"
    )
    way = "" if identity["transport"] == "directly" else f" {identity['transport']}"
    return f"{identity['model']} ({identity['root']}) at {identity['url']}{way}{release}{about}"


def _coverage(coverage: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in coverage["kinds"].items())
    missing = coverage["not_covered"]
    lacking = [
        f"{what} {', '.join(missing[name])}"
        for name, what in (("kinds", "the kinds"), ("tokens", "tokens"))
        if missing[name]
    ]
    of_set = f". Of mtppp's set not covered: {'; '.join(lacking)}" if lacking else ""
    return f"{kinds}; the longest has {coverage['longest']} tokens{of_set}"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<{_LABEL}}" if label else "  ",
        subsequent_indent=" " * (_LABEL + 2) if label else "  ",
        break_on_hyphens=False,
    ) or [f"  {label}"]
