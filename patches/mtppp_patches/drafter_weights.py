"""Gives the drafter on the last stage its embedding.

Without pipelining the drafter shares the target's embedding. With it, the target's is on the first
stage and the drafter keeps its own. The classes named here load that from a copy below the MTP
layer (`model.layers.N.embed_tokens.weight`) and pass over the model's; a checkpoint without the
copy leaves the drafter with uninitialised rows: the text stays right and no draft is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, PatchError, Target
from mtppp_patches.releases import releases

EMBEDDING = "model.embed_tokens.weight"

_DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def _with_embedding(original: Callable[..., set[str]], spec: EngineSpec) -> Callable[..., set[str]]:
    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        parameter = self.model.embed_tokens.weight
        passed = set()

        def load_embedding() -> Iterator[tuple[str, Any]]:
            for name, weight in weights:
                if name == EMBEDDING:
                    parameter.weight_loader(parameter, weight)
                    passed.add(name)
                else:
                    yield name, weight

        loaded = original(self, load_embedding()) | passed
        if EMBEDDING not in loaded:
            raise PatchError(
                f"the checkpoint has no {EMBEDDING}: the drafter on the last pipeline stage would "
                "run with an uninitialised embedding"
            )
        return loaded

    return load_weights


PATCH = Patch(
    name="drafter_weights",
    why=(
        "The drafter on the last stage runs with an uninitialised embedding when the checkpoint "
        "has no copy of it below the MTP layer: drafts are hardly ever accepted."
    ),
    releases=releases("0.23.0", "0.29.0"),
    obsolete_by="0.30.0: load_weights of these classes takes the model's embedding",
    wanted=lambda spec: spec.mtp and spec.pipeline > 1 and spec.model_type in _DEEPSEEK,
    targets=(
        Target(
            "vllm.model_executor.models.deepseek_mtp",
            "DeepSeekMTP.load_weights",
            _with_embedding,
        ),
        Target(
            "vllm.models.deepseek_v32.nvidia.mtp",
            "DeepseekV32MTP.load_weights",
            _with_embedding,
            releases=("0.29.0",),
        ),
        Target("vllm.v1.worker.gpu.spec_decode.eagle.utils", "load_eagle_model"),
    ),
)
