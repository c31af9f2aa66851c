"""What patches assume of vLLM's sources beyond what they replace, by patch.

Had one of these been changed, the patch would still be put in place, raise nothing and do the wrong
thing. They are targets that are only leaned on, as those that a patch names itself; a patch whose
results are on record is not edited for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import RELEASES, releases

_LAST = RELEASES[-1]
_DOTS3 = "vllm.models.dots3_note.nvidia.model"
_SHARED_INDICES = ("deepseek_v32", "glm_moe_dsa", "dots3_note")

# Which requests a step has, and that ranks run steps in the order in which they were scheduled.
_STEPS = (
    Target("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Target("vllm.v1.engine.core", "EngineCore.step_with_batch_queue"),
    Target("vllm.v1.worker.gpu.input_batch", "InputBatch"),
)

ASSUMPTIONS: Mapping[str, tuple[Target, ...]] = {
    # That these say which scheduler and which runner will run.
    "engine_guard": (
        Target("vllm.config.scheduler", "SchedulerConfig.get_scheduler_cls"),
        Target("vllm.config.vllm", "VllmConfig.use_v2_model_runner"),
    ),
    "draft_relay": _STEPS,
    # That a layer leaves its attention's output to be summed with its norm, and that the hand-over
    # takes one slice from each rank.
    "stage_boundary": (
        Target(
            "vllm.models.deepseek_v32.attention",
            "DeepseekV32Attention",
            families=("deepseek_v32", "glm_moe_dsa"),
        ),
        Target(_DOTS3, "Dots3NoteFullAttention", families=("dots3_note",)),
        Target(_DOTS3, "Dots3NoteSlidingAttention", families=("dots3_note",)),
        Target("vllm.distributed.parallel_state", "GroupCoordinator.isend_tensor_dict"),
        Target("vllm.distributed.parallel_state", "GroupCoordinator.irecv_tensor_dict"),
        Target("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
    ),
    # The rules by which layers share indices, of the families that `index_share` knows.
    "index_share": (
        Target(
            "vllm.model_executor.models.deepseek_v2",
            "DeepseekV2MLAAttention.__init__",
            families=_SHARED_INDICES,
        ),
        Target(
            "vllm.models.deepseek_v32.nvidia.attention",
            "DeepseekV32Attention",
            releases=releases("0.25.1", "0.26.0"),
            families=_SHARED_INDICES,
        ),
        Target(
            "vllm.models.deepseek_v32.attention",
            "DeepseekV32Attention",
            releases=releases("0.27.1", _LAST),
            families=_SHARED_INDICES,
        ),
        Target(
            "vllm.models.hy_v4.nvidia.attention",
            "compute_skip_topk_layers",
            releases=releases("0.29.0", _LAST),
            families=("hy_v4",),
        ),
        Target(
            "vllm.models.minimax_m3.amd.model",
            "_should_skip_index_topk",
            releases=releases("0.25.1", _LAST),
            families=("minimax_m3_vl",),
        ),
        Target(
            "vllm.models.deepseek_v41.attention",
            "DeepseekV4Attention.__init__",
            releases=releases("0.30.0", _LAST),
            families=("deepseek_v41",),
        ),
    ),
    # What a step's batch holds, and that what the engine asks of all ranks comes between two steps.
    "invariants": (
        *_STEPS,
        Target("vllm.v1.worker.gpu.model_runner", "ExecuteModelState"),
        Target("vllm.v1.core.sched.output", "SchedulerOutput"),
        Target("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc"),
        Target("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
    ),
}


def with_assumptions(patch: Patch) -> Patch:
    """The same patch, and what it assumes among its targets."""
    assumed = ASSUMPTIONS.get(patch.name, ())
    return dataclasses.replace(patch, targets=(*patch.targets, *assumed))
