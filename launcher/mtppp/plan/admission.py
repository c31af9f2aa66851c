"""Whether a deployment may be launched: proven combinations only, everything else is refused."""

from __future__ import annotations

from dataclasses import dataclass

from mtppp.errors import Refused
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.support import admissible


@dataclass(frozen=True, slots=True)
class Admission:
    """Why a deployment is allowed.

    Attributes:
        evidence: one line, for the Plan and for `status`.
        at_own_risk: codes of refusals that the file overrides.
    """

    evidence: str
    at_own_risk: tuple[str, ...] = ()


def admit(spec: EngineSpec) -> Admission:
    """Decide by the table that comes with the patches.

    Raises:
        Refused: with each reason and the way out.
    """
    verdict = admissible(spec)
    if not verdict.allowed:
        first = verdict.refusals[0]
        overridable = [refusal.code for refusal in verdict.refusals if refusal.overridable]
        risk = f"; `at_own_risk: [{', '.join(overridable)}]` goes ahead all the same"
        raise Refused(
            f"{spec.model_type} on vLLM {spec.release}: {first.reason}",
            details=[refusal.reason for refusal in verdict.refusals[1:]],
            hint=verdict.way_out + (risk if len(overridable) == len(verdict.refusals) else ""),
        )
    proven = ", ".join(f"{what}: {found.level}" for what, found in verdict.evidence.items())
    risks = tuple(refusal.code for refusal in verdict.at_own_risk)
    return Admission(
        evidence=f"evidence {proven}" if proven else "as vLLM ships it",
        at_own_risk=risks,
    )
