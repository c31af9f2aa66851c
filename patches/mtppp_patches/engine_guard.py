"""Stops an engine that is known to be wrong, whatever the deployment says of it.

An engine's command line may ask for what the deployment's file does not: speculation of another
kind, expert load balancing, other classes, another layout. What vLLM made of it is judged here by
the table that the launcher judges files by; what is only unproven is left to the launcher.

PP + MTP is right only with the V2 runner under the asynchronous scheduler. Either can be lost
without an error: to the environment variable missing in one process, to a platform that switches
asynchronous scheduling off, to a scheduler class named on the command line, to features or entry
points that the V2 runner does not support. What counts is therefore looked at where it is final: in
EngineCore when it makes its executor, before any worker starts, and in each worker once it has its
runner. (EngineCore itself loads plugins while it is being made: where it has a fresh process, as
under `vllm serve`, a replacement of its constructor comes too late.) Of what vLLM refuses by itself
when its configuration is made, the package is named that brought it along.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import Patch, PatchError, Target
from mtppp_patches.releases import RELEASES, releases

Function = Callable[..., Any]

_V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# 0.32.0's V2 runner has a place for processors of logits, and no word of them to complete.
_NAMES_PROCESSORS = releases("0.23.0", "0.30.0")
# Codes of refusals of what is wrong on every release, or starts and is not known to be right.
_WRONG = frozenset(
    {
        "drafter_embedding",
        "speculative_method",
        "other_classes",
        "expert_data_parallel",
        "eplb_pipeline",
        "eplb_mtp",
    }
)


def _before_workers_start(original: Function, spec: EngineSpec) -> Function:
    def __init__(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        if require_sound(vllm_config, spec):
            require_async_scheduler(vllm_config)
            require_v2_runner(vllm_config)
        original(self, vllm_config, *arguments, **named)

    return __init__


def _once_the_runner_is_there(original: Function, spec: EngineSpec) -> Function:
    def init_device(self: Any) -> None:
        original(self)
        if not require_sound(self.vllm_config, spec):
            return
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        require_async_scheduler(self.vllm_config)
        runner = self.worker.model_runner
        if not isinstance(runner, GPUModelRunner):
            raise PatchError(
                f"this worker runs {type(runner).__module__}.{type(runner).__name__} instead of "
                f"the V2 model runner: {why_not_v2(self.vllm_config)}. "
                "Pipeline parallelism with MTP is wrong on any other."
            )

    return init_device


def require_sound(vllm_config: Any, spec: EngineSpec) -> bool:
    """Whether this engine drafts with MTP over stages, if it may run at all.

    Raises:
        PatchError: it is wrong, or needs patches that it was not planned with.
    """
    from mtppp_patches.support import admissible

    running = as_configured(vllm_config, spec)
    verdict = admissible(running)
    if wrong := [refusal for refusal in verdict.refusals if refusal.code in _WRONG]:
        raise PatchError("; ".join(f"{refusal.reason}: {refusal.way_out}" for refusal in wrong))
    if unplanned := sorted(set(verdict.patches) - set(spec.patches)):
        raise PatchError(
            f"this engine needs patches that it was not planned with: {', '.join(unplanned)}. It "
            "runs otherwise than its deployment says: launch it from a file that says so."
        )
    return running.mtp and running.pipeline > 1


def as_configured(vllm_config: Any, spec: EngineSpec) -> EngineSpec:
    """`spec`, with all that vLLM itself was told instead of what the deployment says of it."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    other_classes = (
        str(getattr(model.model_impl, "value", model.model_impl)) not in {"auto", "vllm"}
        # Since 0.25.1.
        or bool(getattr(model, "model_class_overrides", None))
        or _names_classes(model.hf_overrides)
    )
    return dataclasses.replace(
        spec,
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        prefill_context=parallel.prefill_context_parallel_size,
        decode_context=parallel.decode_context_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        eplb=parallel.enable_eplb,
        other_classes=spec.other_classes or other_classes,
        # Of the deployment's number of stages.
        layer_partition=None,
        speculative=speculative
        and Speculative(speculative.method, speculative.num_speculative_tokens),
    )


def _names_classes(overrides: Any) -> bool:
    """Whether what overrides a configuration, or a part of it, says which classes are built."""
    if not isinstance(overrides, dict):
        return False
    return not overrides.keys().isdisjoint({"architectures", "model_type"}) or any(
        map(_names_classes, overrides.values())
    )


def require_async_scheduler(vllm_config: Any) -> None:
    """Raises PatchError unless the asynchronous scheduler is what will run."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    scheduler_config = vllm_config.scheduler_config
    consequence = "Pipeline parallelism with MTP needs asynchronous scheduling and hangs without."
    if not scheduler_config.async_scheduling:
        from vllm.platforms import current_platform

        raise PatchError(
            "asynchronous scheduling is off although the deployment asks for it: switched off by "
            f"--no-async-scheduling, by the platform ({type(current_platform).__name__}), or by an "
            "option that vLLM's log names ('Async scheduling ... will be disabled'). "
            f"{consequence}"
        )
    scheduler = scheduler_config.get_scheduler_cls()
    if not issubclass(scheduler, AsyncScheduler):
        raise PatchError(
            f"--scheduler-cls {scheduler.__module__}.{scheduler.__name__} is no AsyncScheduler. "
            f"{consequence}"
        )


def require_v2_runner(vllm_config: Any) -> None:
    """Raises PatchError unless the V2 model runner is what will run, with all that is asked for.

    With VLLM_USE_V2_MODEL_RUNNER=1 vLLM itself ends where that runner lacks something, when its
    configuration is made. What comes to be lacking later, it does not look for.
    """
    if not vllm_config.use_v2_model_runner:
        raise PatchError(
            f"vLLM chose the V1 model runner: {why_not_v2(vllm_config)}. "
            "Pipeline parallelism with MTP does not work on it."
        )
    if lacking := unsupported_by_v2(vllm_config):
        raise PatchError(
            f"the V2 model runner of this release does not support: {'; '.join(lacking)}. "
            "Pipeline parallelism with MTP works on no other: leave that out."
        )


def why_not_v2(vllm_config: Any) -> str:
    """What makes vLLM choose the V1 model runner, as far as can be told."""
    value = os.environ.get(_V2_VARIABLE)
    if value == "0":
        return f"{_V2_VARIABLE} is 0 in this process"
    missing = [] if value else [f"{_V2_VARIABLE} is not set in this process"]
    return "; ".join([*missing, *unsupported_by_v2(vllm_config)]) or "no reason found"


def unsupported_by_v2(vllm_config: Any) -> list[str]:
    """Features asked for that this release's V2 runner lacks, as vLLM itself finds them."""
    features: list[str] = vllm_config._get_v2_model_runner_unsupported_features()
    return features


def _with_entry_points(features: Iterable[str]) -> list[str]:
    """The same features; those that installed packages ask for by themselves, with the names."""
    group = "vllm.logits_processors"
    names = ", ".join(entry.name for entry in entry_points(group=group))
    return [
        f"{feature} (installed entry points {group}: {names})"
        if names and feature == "custom logits processors"
        else feature
        for feature in features
    ]


def _name_entry_points(original: Function, spec: EngineSpec) -> Function:
    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        """vLLM's own errors are of this list."""
        return _with_entry_points(original(self))

    return _get_v2_model_runner_unsupported_features


PATCH = Patch(
    name="engine_guard",
    why=(
        "With the synchronous scheduler PP + MTP hangs or corrupts, with the V1 runner it dies, "
        "and vLLM falls back to either without an error. An engine may be told what its "
        "deployment's file does not say, and what is refused there."
    ),
    releases=RELEASES,
    obsolete_by="nothing up to 0.33.0",
    scope="deployment",
    wanted=lambda spec: spec.pipeline > 1,
    targets=(
        Target("vllm.v1.executor.abstract", "Executor.__init__", _before_workers_start),
        # That it loads plugins before it makes the executor.
        Target("vllm.v1.engine.core", "EngineCore.__init__"),
        Target(
            "vllm.config.vllm",
            "VllmConfig._get_v2_model_runner_unsupported_features",
            _name_entry_points,
            releases=_NAMES_PROCESSORS,
        ),
        Target(
            "vllm.config.vllm",
            "VllmConfig._get_v2_model_runner_unsupported_features",
            releases=releases("0.31.0", RELEASES[-1]),
        ),
        Target(
            "vllm.v1.worker.worker_base",
            "WorkerWrapperBase.init_device",
            _once_the_runner_is_there,
        ),
    ),
)
