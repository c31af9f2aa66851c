"""Whether a deployment may be launched: proven combinations only, everything else is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtppp.errors import Refused
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.support import Evidence, Refusal, admissible

NOT_PROVEN = "not proven"


@dataclass(frozen=True, slots=True)
class Admission:
    """What is known of a combination of model, release and parallelism.

    Attributes:
        refusals: what stands in the way; empty when it may be launched.
        overridden: refusals that the file's `at_own_risk` overrides.
        proofs: what was shown, by name of patch and under "decode".
        family: the model's.
    """

    refusals: tuple[Refusal, ...] = ()
    overridden: tuple[Refusal, ...] = ()
    proofs: Mapping[str, Evidence] = field(default_factory=dict)
    family: str = ""

    @property
    def evidence(self) -> str:
        """One line, for the Plan and for `status`."""
        proven = ", ".join(
            f"{what}: {proof.for_family(self.family)}" for what, proof in self.proofs.items()
        )
        if self.refusals or (self.overridden and not proven):
            return NOT_PROVEN
        return f"evidence {proven}" if proven else "as vLLM ships it"


def consider(spec: EngineSpec) -> Admission:
    """Decide by the table that comes with the patches."""
    verdict = admissible(spec)
    return Admission(verdict.refusals, verdict.at_own_risk, verdict.evidence, spec.model_type)


def refuse(subject: str, refusals: Sequence[Refusal]) -> None:
    """Pass only when there is nothing to refuse.

    Args:
        subject: what is refused, for the message.

    Raises:
        Refused: with each reason and the way out.
    """
    if not refusals:
        return
    first, *others = refusals
    ways_out = list(dict.fromkeys(refusal.way_out for refusal in refusals if refusal.way_out))
    if all(refusal.overridable for refusal in refusals):
        codes = ", ".join(dict.fromkeys(refusal.code for refusal in refusals))
        ways_out.append(f"`at_own_risk: [{codes}]` goes ahead all the same")
    raise Refused(
        f"{subject}: {first.reason}",
        details=[refusal.reason for refusal in others],
        hint="; ".join(ways_out),
    )
