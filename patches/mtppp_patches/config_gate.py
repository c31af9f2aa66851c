"""Lets a model that pipelines have an MTP drafter that does not.

The drafter runs on the last stage as a whole, but vLLM up to 0.29 copies the target's pipeline
size into the drafter's parallel configuration and then demands that the drafter's class support
pipelining. Nothing but that check reads the drafter's pipeline size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import releases


def _of_one_stage(original: Callable[..., Any], spec: EngineSpec) -> Callable[..., Any]:
    def create_draft_parallel_config(
        target_parallel_config: Any, speculative_draft_tensor_parallel_size: int
    ) -> Any:
        one_stage = copy.copy(target_parallel_config)
        one_stage.pipeline_parallel_size = 1
        return original(one_stage, speculative_draft_tensor_parallel_size)

    return create_draft_parallel_config


PATCH = Patch(
    name="config_gate",
    why=(
        "vLLM verifies the MTP drafter as if it were spread over the pipeline's stages and refuses "
        "to start (`NotImplementedError: Pipeline parallelism is not supported for this model`)."
    ),
    releases=releases("0.23.0", "0.29.0"),
    obsolete_by="0.30.0: create_draft_parallel_config sets pipeline_parallel_size=1",
    scope="decode",
    wanted=lambda spec: spec.mtp and spec.pipeline > 1,
    targets=(
        Target(
            "vllm.config.speculative",
            "SpeculativeConfig.create_draft_parallel_config",
            _of_one_stage,
        ),
        Target("vllm.config.speculative", "SpeculativeConfig._verify_args"),
    ),
)
