"""Completes what one pipeline stage hands to the next.

In DeepSeek-V3.2, GLM-5.2 and what is built on their layers, a layer leaves the output of its MLP as
one share per tensor-parallel rank, and the next layer sums the shares together with its norm. The
last layer of a stage has no next layer. Its shares are handed over as they are, but the hand-over
takes a tensor for equal on all ranks: it sends one slice from each rank and joins the slices. The
next stage then sums that patchwork. The residual is right, so the text reads well; it is the output
of another model.

Here the shares are summed before the hand-over. The first layer of the next stage sums again, so
its first rank presents the sum and the others zeros. The sum of x and zeros is x in every
floating-point format and in any order, so nothing is lost on the way; with the same all-reduce in
both places that layer computes on the very numbers that it would have had without pipelining (a
GPU may sum within a stage in a fused kernel, which rounds otherwise). Other ways to neutralise
its sum are not exact in bfloat16: a share of
1/n each is rounded n times over, and adding the sum to the residual rounds what some of vLLM's
norms add in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import RELEASES, releases

Function = Callable[..., Any]

# The first release in which a model, on a device, is built on these layers. Before it, and on CPU,
# vLLM takes a generic implementation, which sums in each layer.
FIRST_AFFECTED = {
    ("deepseek_v32", "cuda"): "0.29.0",
    ("glm_moe_dsa", "cuda"): "0.29.0",
    ("deepseek_v32", "rocm"): "0.31.0",
    ("glm_moe_dsa", "rocm"): "0.31.0",
    ("dots3_note", "cuda"): "0.28.0",
    ("dots3_note", "rocm"): "0.28.0",
}


def affected(spec: EngineSpec) -> bool:
    """Whether stages of `spec` would hand over shares instead of sums. Pure."""
    first = FIRST_AFFECTED.get((spec.model_type, spec.device))
    return (
        first is not None
        and spec.release in releases(first, RELEASES[-1])
        and spec.tensor > 1
        and spec.pipeline > 1
    )


def _sum_at_the_boundary(original: Function, spec: EngineSpec) -> Function:
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
    from vllm.sequence import IntermediateTensors

    def with_hidden_states(handed_over: Any, change: Callable[[Any], Any]) -> Any:
        tensors = handed_over.tensors
        return IntermediateTensors({**tensors, "hidden_states": change(tensors["hidden_states"])})

    def forward(
        self: Any,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Any:
        if intermediate_tensors is not None and get_tensor_model_parallel_rank() > 0:
            intermediate_tensors = with_hidden_states(intermediate_tensors, torch.zeros_like)
        output = original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
        if isinstance(output, IntermediateTensors):
            output = with_hidden_states(output, tensor_model_parallel_all_reduce)
        return output

    return forward


_NVIDIA = "vllm.models.deepseek_v32.nvidia.model"
_AMD = "vllm.models.deepseek_v32.amd.model"
_DOTS3 = "vllm.models.dots3_note.nvidia.model"

PATCH = Patch(
    name="stage_boundary",
    why=(
        "With tensor and pipeline parallelism each stage hands over its last layer's output before "
        "it is summed over the tensor-parallel ranks: every token is computed from wrong numbers."
    ),
    releases=releases("0.28.0", "0.33.0"),
    obsolete_by="nothing up to 0.33.0",
    wanted=affected,
    targets=(
        Target(_NVIDIA, "DeepseekV32Model.forward", _sum_at_the_boundary),
        Target(_AMD, "DeepseekV32Model.forward", _sum_at_the_boundary),
        # That each layer sums what it is given, once, and leaves its own output to the next.
        Target(_NVIDIA, "DeepseekV32DecoderLayer"),
        Target(_AMD, "DeepseekV32DecoderLayer"),
        Target("vllm.models.common.ops.fused_allreduce_rms_norm", "fused_allreduce_rms_norm"),
        Target("vllm.model_executor.models.deepseek_v2", "DeepseekV2MLP"),
        Target("vllm.model_executor.models.deepseek_v2", "DeepseekV2MoE"),
        # That these inherit both forward methods.
        Target(_DOTS3, "Dots3NoteModel"),
        Target(_DOTS3, "Dots3NoteDecoderLayer"),
        Target(_DOTS3, "Dots3NoteMoE"),
    ),
)
