"""Every rank says what it really is: one JSON file per rank in its node's run directory.

Written from inside the worker once its weights are loaded and its KV cache is laid out, so it
tells of the process that will serve and not of a plan. The launcher reads the files back and
fails where they differ from the Plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtppp_patches.engine_spec import RUN_DIR_VARIABLE, EngineSpec
from mtppp_patches.patch import Patch, Target, applied, displaced
from mtppp_patches.releases import RELEASES

if TYPE_CHECKING:
    from mtppp_patches.support import Evidence

DIRECTORY = "attest"
SCHEMA = 1


def held_layers(model: Any) -> list[int]:
    """Indices of the decoder layers that this rank holds, of a model or its stage.

    The decoder is the longest ModuleList named `layers`; a place that belongs to another stage
    holds a PPMissingLayer, an identity.
    """
    from torch import nn

    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
    ]
    longest = max(stacks, key=len, default=nn.ModuleList())
    return [
        index for index, layer in enumerate(longest) if type(layer).__name__ != "PPMissingLayer"
    ]


def is_v2(runner: Any) -> bool:
    """Whether this is vLLM's V2 model runner, or a platform's subclass of it."""
    return any(base.__module__.startswith("vllm.v1.worker.gpu.") for base in type(runner).__mro__)


def digest(value: str) -> str:
    """What stands for the value of a variable, which may be secret."""
    return hashlib.sha256(value.encode()).hexdigest()[:12]


def hashed(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables by name, each with the digest of its value."""
    return {name: digest(value) for name, value in sorted(environment.items())}


def proofs(spec: EngineSpec) -> Mapping[str, Evidence]:
    """What was shown of this combination, by the table that this process has."""
    from mtppp_patches.support import admissible

    return admissible(spec).evidence


def watched(spec: EngineSpec) -> str:
    """What a violated invariant does in this process; "off", with a warning, if none is watched."""
    if any(patch.name == "invariants" for patch in applied()):
        return spec.invariants
    if spec.invariants != "off":
        from vllm.logger import init_logger

        init_logger("vllm.mtppp").warning(
            "invariants are not watched although the deployment asks for it: they are of the ranks "
            "of one engine with stages on the V2 runner (stages: %d, engines: %d, runner: %s)",
            spec.pipeline,
            spec.data_parallel,
            spec.runner,
        )
    return "off"


def attestation(worker: Any, spec: EngineSpec) -> dict[str, Any]:
    """What this rank is.

    Args:
        worker: vLLM's worker (`vllm.v1.worker.worker_base.WorkerBase`), weights loaded.
    """
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.version import __version__

    runner = worker.model_runner
    config = worker.vllm_config
    speculator = getattr(runner, "speculator", None)
    return {
        "schema": SCHEMA,
        "rank": worker.rank,
        "stage": get_pp_group().rank_in_group,
        "tensor_rank": get_tp_group().rank_in_group,
        "address": os.environ.get("VLLM_HOST_IP"),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "layers": held_layers(runner.model),
        "drafter": None if speculator is None else type(speculator).__qualname__,
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "runner_v2": is_v2(runner),
        "executor": str(config.parallel_config.distributed_executor_backend),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "vllm": __version__,
        "plugins": Path(__file__).parent.parent.name,
        "patches": {
            patch.name: {"targets": list(patch.targets), "pending": list(patch.pending)}
            for patch in applied()
        },
        "displaced": displaced(),
        "invariants": watched(spec),
        "evidence": {what: asdict(shown) for what, shown in proofs(spec).items()},
        "at_own_risk": list(spec.at_own_risk),
        "environment": hashed(os.environ),
        "planned_release": spec.release,
    }


def _attest_after(original: Any, spec: EngineSpec) -> Any:
    @functools.wraps(original)
    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> None:
        original(self, kv_cache_configs)
        write(attestation(self.worker, spec))

    return initialize_from_config


def write(record: dict[str, Any]) -> None:
    """Put a rank's record in the run directory, whole or not at all."""
    directory = Path(os.environ[RUN_DIR_VARIABLE]) / DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"rank-{record['rank']:04d}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    temporary.replace(path)


PATCH = Patch(
    name="attest",
    why="A launcher that assumes what its ranks are cannot say that they are right.",
    releases=RELEASES,
    obsolete_by="none",
    scope="deployment",
    wanted=lambda spec: True,
    targets=(
        Target(
            "vllm.v1.worker.worker_base",
            "WorkerWrapperBase.initialize_from_config",
            replace=_attest_after,
        ),
    ),
)
