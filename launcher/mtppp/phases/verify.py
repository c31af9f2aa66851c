"""Decide at the end of a launch whether it gives the same model as a baseline."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mtppp.cluster.schema import Verify as Section
from mtppp.console import Step
from mtppp.engine.client import EngineClient
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace
from mtppp.verify.prompts import own_set
from mtppp.verify.run import Settings
from mtppp.verify.servers import Server
from mtppp.verify.session import Outcome, recorded_tier, verify, verify_by_stored
from mtppp.verify.tiers import SMOKE, TIERS

KEY_VARIABLE = "MTPPP_BASELINE_KEY"

_DEADLINE = 30.0  # seconds


class FindBaseline(WithoutTrace):
    """See that what the launch will be verified by is there, before anything is started."""

    title = "baseline"

    def run(self, deployment: Deployment, step: Step) -> None:
        section = _section(deployment)
        if section.baseline:
            tier = recorded_tier(section.baseline)
            step.note = f"{section.baseline}, {tier.name} tier"
        else:
            url = section.baseline_url or ""
            with EngineClient(url, timeout=_DEADLINE, headers=_key()) as client:
                step.note = f"{url} serves {', '.join(client.models())}"


def _section(deployment: Deployment) -> Section:
    """What the file says; it is a mistake of ours to ask where it says nothing."""
    assert deployment.cluster.verify is not None
    return deployment.cluster.verify


def _key() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class Verify(WithoutTrace):
    """The smoke tier, or that of the stored baseline."""

    title = "verify"

    def run(self, deployment: Deployment, step: Step) -> None:
        section = _section(deployment)
        outcome = _verified(deployment, section, step)
        verdict = outcome.verdict
        step.note = f"{verdict.headline}: {verdict.why[0]}"
        step.succeeded = verdict.passed
        if verdict.outcome == "FAIL" and section.on_fail == "stop":
            raise MtpppError(
                f"{deployment.plan.name} does not give the baseline's model",
                details=outcome.lines,
                hint="verify.on_fail: keep would leave it running, to be looked at",
            )
        deployment.exit_status = verdict.exit_status
        deployment.report = outcome.lines if verdict.outcome != "PASS" or verdict.warnings else []


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
    )


def _verified(deployment: Deployment, section: Section, step: Step) -> Outcome:
    plan = deployment.plan
    tier = recorded_tier(section.baseline) if section.baseline else TIERS[SMOKE]
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    common = partial(
        verify_by_stored if section.baseline else verify,
        Path("mtppp-verify") / f"{now}-{plan.name}",
        settings=Settings(tier),
        prompts=own_set(tier.requests),
        candidate=candidate_of(deployment, plan.endpoint),
        about={"candidate": {"evidence": plan.evidence}},
        progress=step.progress,
    )
    if section.baseline:
        return common(stored=section.baseline)
    key = os.environ.get(KEY_VARIABLE, "")
    return common(baseline=Server("baseline", section.baseline_url or "", key=key))
