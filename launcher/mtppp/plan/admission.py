"""Whether a deployment may be launched: proven combinations only, everything else is refused."""

from __future__ import annotations

from dataclasses import dataclass

from mtppp.cluster import Cluster
from mtppp.errors import Refused
from mtppp.model.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Admission:
    """Why a deployment is allowed.

    Attributes:
        evidence: one line, for the Plan and for `status`.
        at_own_risk: codes of refusals that the file overrides.
    """

    evidence: str
    at_own_risk: tuple[str, ...] = ()


def admit(cluster: Cluster, model: ModelFacts) -> Admission:
    """Decide.

    Raises:
        Refused: with the reason and the way out.
    """
    if cluster.runtime.vllm == "0.32.0" and model.model_type in ("glm4_moe", "deepseek_v3"):
        return Admission("engine")
    raise Refused(f"{model.model_type} on vLLM {cluster.runtime.vllm} is not proven", hint="see `mtppp patches`")
