"""Whether a deployment may be launched: proven combinations only, everything else is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """Why a deployment is allowed.

    Attributes:
        evidence: one line, for the Plan and for `status`.
        at_own_risk: codes of refusals that the file overrides.
    """

    evidence: str
    at_own_risk: tuple[str, ...] = ()
