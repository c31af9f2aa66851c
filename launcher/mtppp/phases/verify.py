"""Decide at the end of a launch whether it gives the model it should, and open it to others."""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mtppp.cluster.schema import Verify as Section
from mtppp.console import Step
from mtppp.engine.client import EngineClient
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.gate import AT_OWN_RISK, held, open_gate
from mtppp.phases.identity import identity
from mtppp.phases.phase import WithoutTrace
from mtppp.verify.prompts import brief_set, own_set
from mtppp.verify.run import Settings
from mtppp.verify.servers import Server
from mtppp.verify.session import (
    Outcome,
    check_baseline,
    recorded_tier,
    undecided,
    verify,
    verify_by_stored,
)
from mtppp.verify.tiers import GLANCE, SMOKE, TIERS
from mtppp.verify.verdict import Figures, Verdict

KEY_VARIABLE = "MTPPP_BASELINE_KEY"

_SELF_SCORED = "self-score, {0.outliers} of {0.tokens} tokens objected to; compared with nothing"

_DEADLINE = 30.0  # seconds


class FindBaseline(WithoutTrace):
    """See that what the launch will be verified by is there, before anything is started."""

    title = "baseline"

    def run(self, deployment: Deployment, step: Step) -> None:
        section = deployment.cluster.verify
        if section.baseline:
            tier = check_baseline(section.baseline)
            step.note = f"{section.baseline}, {tier.name} tier"
        else:
            url = section.baseline_url or ""
            with EngineClient(url, timeout=_DEADLINE, headers=_key()) as client:
                step.note = f"{url} serves {', '.join(client.models())}"


def _key() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class Verify(WithoutTrace):
    """By the baseline that the file names: the smoke tier, or that of the stored one."""

    title = "verify"

    def run(self, deployment: Deployment, step: Step) -> None:
        gate = held(deployment, deployment.plan.endpoint)
        try:
            outcome = _verified(deployment, step)
        except ConfigurationError as error:  # what serves is not to end for it
            outcome = undecided(TIERS[_tier(deployment)], error)
        verdict = outcome.verdict
        step.note = f"{verdict.headline}: {verdict.why[0]}"
        step.succeeded = verdict.passed
        why = _kept_open(
            deployment.cluster.verify, verdict, f"PASS of the {_tier(deployment)} tier"
        )
        _stop_if_told(deployment, outcome, "does not give the baseline's model")
        if why:
            open_gate(deployment, gate, deployment.plan.endpoint, why)
        _conclude(deployment, outcome, opened=bool(why))
        if verdict.outcome == "PASS" and not verdict.warnings:
            deployment.report = []


class SelfScore(WithoutTrace):
    """Where no baseline is named: the model scores a few answers of its own.

    That is too little for a PASS, and gross faults of decoding are FAIL all the same.
    """

    title = "self-score"

    def run(self, deployment: Deployment, step: Step) -> None:
        gate = held(deployment, deployment.plan.endpoint)
        directory = Path(tempfile.mkdtemp(prefix=f"mtppp-verify-{deployment.plan.name}-"))
        try:
            outcome = verify(
                directory,
                Settings(GLANCE),
                brief_set(GLANCE.requests),
                candidate=candidate_of(deployment, deployment.plan.endpoint),
                baseline=None,
                about=known_of(deployment),
                progress=step.count,
            )
        except ConfigurationError as error:
            outcome = undecided(GLANCE, error)
        verdict = outcome.verdict
        sound = verdict.judged and verdict.outcome != "FAIL" and _agrees(verdict.figures)
        seen = _seen(verdict.figures, outcome.result.get("known"))
        found = verdict.why[0] if verdict.outcome == "FAIL" or not verdict.judged else seen
        step.note = seen if sound else f"{verdict.headline}: {found}"
        step.succeeded = True if sound else verdict.passed
        section = deployment.cluster.verify
        why = _SELF_SCORED.format(verdict.figures) if sound else _kept_open(section, verdict, "")
        _stop_if_told(deployment, outcome, "objects to its own tokens")
        if why:
            open_gate(deployment, gate, deployment.plan.endpoint, why)
        if sound:
            shutil.rmtree(directory)
            return
        _conclude(deployment, outcome, opened=bool(why))


def _agrees(figures: Figures) -> bool:
    """Whether it objects to no more of its own tokens than rounding may explain."""
    return figures.outliers < 3 or figures.outliers < 10 * GLANCE.token_margin * figures.tokens


def _seen(figures: Figures, known: dict[str, int] | None) -> str:
    """What a glance found, and what it cannot see."""
    texts = f"; {known['right']} of {known['asked']} well-known texts go on" if known else ""
    return (
        f"it objects to {figures.outliers} of its own {figures.tokens} tokens{texts}."
        " No baseline is named: weights and forward pass were not compared"
    )


def _kept_open(section: Section, verdict: Verdict, passed: str) -> str:
    """Why the gate is to be opened; "" when it is not."""
    if verdict.outcome == "PASS":
        return passed
    key = "on_fail" if verdict.outcome == "FAIL" else "on_inconclusive"
    if getattr(section, key) != "keep":
        return ""
    return f"{verdict.headline}, {AT_OWN_RISK} as verify.{key} says"


def _stop_if_told(deployment: Deployment, outcome: Outcome, what: str) -> None:
    """Raise where a FAIL ends the deployment: a step that fails stops what was started."""
    if outcome.verdict.outcome == "FAIL" and deployment.cluster.verify.on_fail == "stop":
        raise MtpppError(
            f"{deployment.plan.name} {what}",
            details=outcome.lines,
            hint="verify.on_fail: keep-gated would leave it running, to be looked at",
        )


def _conclude(deployment: Deployment, outcome: Outcome, *, opened: bool) -> None:
    """What the launch ends with and shows."""
    deployment.exit_status = outcome.verdict.exit_status
    deployment.holding = not opened
    name = deployment.plan.name
    held = (
        f"{name} holds requests of others: launch again to verify it again,"
        f" `mtppp open {name} --at-own-risk` serves them all the same"
    )
    deployment.report = outcome.lines if opened else [*outcome.lines, "", held]


def _tier(deployment: Deployment) -> str:
    stored = deployment.cluster.verify.baseline
    return (recorded_tier(stored) if stored else TIERS[SMOKE]).name


def known_of(deployment: Deployment) -> dict[str, dict[str, Any]]:
    """For the report: what is known of the candidate besides what its server says.

    Its ranks have attested that they are as the Plan says.
    """
    plan = deployment.plan
    about = {
        "TP": plan.tensor,
        "PP": plan.pipeline,
        "drafts": plan.draft_tokens,
        "evidence": plan.evidence,
        "patches": " ".join(sorted(plan.patches)),
    }
    risk = {"at own risk": " ".join(plan.at_own_risk)} if plan.at_own_risk else {}
    return {"candidate": about | risk | identity(deployment)}


def candidate_of(deployment: Deployment, endpoint: str) -> Server:
    """A deployment's server, reached as its other requests are.

    Raises:
        HostError: the first node cannot be talked to.
    """
    way = deployment.way(endpoint)
    return Server(
        "candidate",
        endpoint,
        deployment.cluster.model.served_name,
        deployment.secrets.get("VLLM_API_KEY", ""),
        transport=str(way),
        socket=way.forwarder.path if way.forwarder else "",
        headers=deployment.gate_header,
    )


def _verified(deployment: Deployment, step: Step) -> Outcome:
    section, plan = deployment.cluster.verify, deployment.plan
    tier = TIERS[_tier(deployment)]
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    common = partial(
        verify_by_stored if section.baseline else verify,
        Path("mtppp-verify") / f"{now}-{plan.name}",
        settings=Settings(tier),
        prompts=own_set(tier.requests),
        candidate=candidate_of(deployment, plan.endpoint),
        about=known_of(deployment),
        progress=step.count,
    )
    if section.baseline:
        return common(stored=section.baseline)
    key = os.environ.get(KEY_VARIABLE, "")
    return common(baseline=Server("baseline", section.baseline_url or "", key=key))
