"""What the deployment is, as the launcher tells it to every process of the engine.

The launcher puts `EngineSpec.to_json()` into the environment variable `MTPPP_ENGINE`; the plugin
reads it back in the API server, in EngineCore and in each worker. Standard library only: the
launcher imports this where there is no vLLM.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

SPEC_VARIABLE = "MTPPP_ENGINE"
DEPLOYMENT_VARIABLE = "MTPPP_DEPLOYMENT"
RUN_DIR_VARIABLE = "MTPPP_RUN_DIR"

Device = Literal["cuda", "rocm", "cpu"]
Runner = Literal["v1", "v2"]
Invariants = Literal["off", "count", "stop"]

_SCHEMA = 1
_FROM_ONE = (
    "tensor",
    "pipeline",
    "data_parallel",
    "prefill_context",
    "decode_context",
    "sample_every",
)


class InvalidSpecError(ValueError):
    """MTPPP_ENGINE is not what this version of the plugin understands."""


@dataclass(frozen=True)
class Speculative:
    """Speculative decoding.

    Attributes:
        method: vLLM's name for it: "mtp", "eagle3", "draft_model", ...
        tokens: draft tokens per step.
    """

    method: str
    tokens: int


@dataclass(frozen=True)
class EngineSpec:
    """One deployment, as far as correctness inside vLLM depends on it.

    Attributes:
        release: vLLM's release without a local part, "0.32.0".
        model_type: `model_type` of the model's config.json.
        prefill_context, decode_context: ranks of context parallelism.
        other_classes: whether the model's classes are not those that vLLM chooses itself.
        layer_partition: layers per stage, or None for vLLM's own split.
        patches: names of the patches the launcher decided on; the plugin decides again and stops
            when the two differ.
        placement: where Ray puts the ranks; None with the mp executor.
        async_scheduling: what the command line asks for.
        runner: the model runner that the environment asks for.
        invariants: whether run-time invariants are watched: "count" logs and counts violations,
            "stop" ends the engine at the first one.
        sample_every: steps from one that is looked at to the next.
        at_own_risk: codes of the refusals that the operator's file overrides.
    """

    release: str
    model_type: str
    device: Device = "cuda"
    tensor: int = 1
    pipeline: int = 1
    data_parallel: int = 1
    prefill_context: int = 1
    decode_context: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    other_classes: bool = False
    layer_partition: tuple[int, ...] | None = None
    speculative: Speculative | None = None
    async_scheduling: bool = True
    runner: Runner = "v2"
    invariants: Invariants = "off"
    sample_every: int = 7
    patches: tuple[str, ...] = ()
    placement: Mapping[str, Any] | None = None
    at_own_risk: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            raise InvalidSpecError(f"device {self.device!r} is none of {get_args(Device)}")
        if self.runner not in get_args(Runner):
            raise InvalidSpecError(f"runner {self.runner!r} is none of {get_args(Runner)}")
        if self.invariants not in get_args(Invariants):
            raise InvalidSpecError(
                f"invariants {self.invariants!r} is none of {get_args(Invariants)}"
            )
        for name in _FROM_ONE:
            if getattr(self, name) < 1:
                raise InvalidSpecError(f"{name} starts at 1")
        if self.layer_partition is not None and len(self.layer_partition) != self.pipeline:
            raise InvalidSpecError(
                f"layer_partition has {len(self.layer_partition)} parts for "
                f"{self.pipeline} pipeline stages"
            )

    @property
    def mtp(self) -> bool:
        """Whether the model's own MTP layers draft."""
        return self.speculative is not None and self.speculative.method == "mtp"

    def to_json(self) -> str:
        """The canonical text: same spec, same bytes."""
        return json.dumps(
            {"schema": _SCHEMA, **dataclasses.asdict(self)}, sort_keys=True, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> EngineSpec:
        """Read what `to_json` wrote.

        Raises:
            InvalidSpecError: not JSON, another schema, an unknown key, a missing or invalid value.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise InvalidSpecError(f"{SPEC_VARIABLE} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("schema", None) != _SCHEMA:
            raise InvalidSpecError(
                f"{SPEC_VARIABLE} is not schema {_SCHEMA}: launcher and plugin are of different "
                "versions of mtppp"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise InvalidSpecError(f"{SPEC_VARIABLE} has unknown keys: {', '.join(unknown)}")
        for name in ("patches", "at_own_risk"):
            data[name] = tuple(data.get(name, ()))
        if (partition := data.get("layer_partition")) is not None:
            data["layer_partition"] = tuple(partition)
        try:
            if (speculative := data.get("speculative")) is not None:
                data["speculative"] = Speculative(**speculative)
            return cls(**data)
        except TypeError as error:
            raise InvalidSpecError(f"{SPEC_VARIABLE}: {error}") from error
