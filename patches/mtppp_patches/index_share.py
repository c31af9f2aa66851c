"""Refuses a pipeline stage whose layers attend with indices that another stage computed.

With sparse attention, some layers choose the positions they attend to and others re-use that
choice: it lies in a buffer on the GPU, and nothing carries the buffer to the next stage. A stage
that begins with a layer of the second kind attends with whatever an earlier step left there. It
depends on history, cannot be reproduced, and the positions may be another request's.

The layers per stage come from VLLM_PP_LAYER_PARTITION on each node, or else from vLLM. So they are
judged where they are final: in EngineCore for all stages, and in each worker for its own, before
any weights are loaded.

Handing the choice over instead would allow every cut, but costs as much traffic as a third of the
hidden states and changes what crosses stages in eleven releases, on kernels that only a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, PatchError, Target
from mtppp_patches.releases import RELEASES

Function = Callable[..., Any]

_HY_V4_SPARSE = frozenset(
    {"sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention"}
)


def layers_read(config: Mapping[str, Any]) -> tuple[int, ...]:
    """For each decoder layer, the lowest whose indices of the same step it uses.

    A layer that uses only its own, or none, has its own number. Pure; the rules are vLLM's and the
    same in 0.23 to 0.33. vLLM goes by `indexer_types` for hy_v4 only.

    Args:
        config: of the text model; a config.json, or the `to_dict()` of a transformers config.
    """
    family = config.get("model_type", "")
    layers = range(config["num_hidden_layers"])
    if family.startswith("deepseek_v41"):
        return tuple(_published_below(config, layer) for layer in layers)
    attending, sharing = _sparse_layers(config, family), _sharing_layers(config, family)
    read = list(layers)
    source = None
    for layer in layers:
        if layer not in attending:
            continue
        if layer not in sharing:
            source = layer
        elif source is not None:
            read[layer] = source
    return tuple(read)


def stage_starts(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers at which a stage may begin, ascending. Pure; `config` as for `layers_read`."""
    read = layers_read(config)
    return tuple(start for start in range(len(read)) if min(read[start:]) >= start)


def why_not(config: Mapping[str, Any], start: int, end: int) -> str | None:
    """Why layers `start` to `end` - 1 cannot be a stage, and which starts could; None: they can."""
    read = layers_read(config)
    cut = next((layer for layer in range(start, end) if read[layer] < start), None)
    if cut is None:
        return None
    legal = stage_starts(config)
    below = max(layer for layer in legal if layer <= start)
    above = [str(layer) for layer in legal if layer > start][:1]
    return (
        f"a pipeline stage would hold layers {start} to {end - 1}, and layer {cut} attends with "
        f"indices that layer {read[cut]} computes on another stage. It would use those of an "
        "earlier step, which may be another request's. Set layer_partition so that the stage "
        f"begins at layer {' or '.join([str(below), *above])}"
    )


def _sparse_layers(config: Mapping[str, Any], family: str) -> frozenset[int]:
    layers = config["num_hidden_layers"]
    if family.startswith("minimax_m3"):
        frequencies = (config.get("sparse_attention_config") or {}).get("sparse_attention_freq")
        return frozenset(n for n, sparse in enumerate(frequencies or ()) if sparse)
    if config.get("index_topk") is None:
        return frozenset()
    kinds = config.get("layer_types")
    if family == "hy_v4":
        return frozenset(n for n, kind in enumerate(kinds or ()) if kind in _HY_V4_SPARSE)
    if family == "dots3_note":
        return frozenset(n for n, kind in enumerate(kinds or ()) if kind != "sliding_attention")
    return frozenset(range(layers))


def _sharing_layers(config: Mapping[str, Any], family: str) -> frozenset[int]:
    layers = range(config["num_hidden_layers"])
    every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset")
    if family.startswith("minimax_m3"):
        if not config.get("use_index_cache"):
            return frozenset()
        sparse = enumerate(sorted(_sparse_layers(config, family)))
        return frozenset(n for nth, n in sparse if max(nth - (offset or 0), 0) % every)
    if family == "hy_v4":
        kinds = config.get("indexer_types")
        if kinds is None:  # As vLLM's HYV4Config fills it in.
            return frozenset(n for n in layers if n > 0 and (n - 1) % 4)
        return frozenset(n for n, kind in enumerate(kinds) if kind == "shared")
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return frozenset(n for n, kind in zip(layers, pattern, strict=False) if kind == "S")
    first = 2 if offset is None else offset
    return frozenset(n for n in layers if max(n - first + 1, 0) % every)


def _published_below(config: Mapping[str, Any], layer: int) -> int:
    """What a layer of DeepSeek-V4.1 takes: compressed KV, indices and candidates, from the last
    layer up to it that publishes them."""
    ratios = config.get("compress_ratios") or ()
    if layer >= len(ratios) or not ratios[layer]:
        return layer
    sources = [
        max((source for source in config.get(key) or () if source <= layer), default=layer)
        for key in ("kv_source_layer_ids", "index_source_layer_ids")
    ]
    candidates = config.get("candidate_source_layer_id", -1)
    if (
        layer in (config.get("index_source_layer_ids") or ())
        and config.get("candidate_topk_blocks", 0) > 0
        and 0 <= candidates < layer
    ):
        sources.append(candidates)
    return min(sources)


def _refuse_before_workers_start(original: Function, spec: EngineSpec) -> Function:
    def __init__(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        for stage in range(vllm_config.parallel_config.pipeline_parallel_size):
            refuse_stage(vllm_config, stage)
        original(self, vllm_config, *arguments, **named)

    return __init__


def _refuse_own_stage(original: Function, spec: EngineSpec) -> Function:
    def init_device(self: Any) -> None:
        original(self)
        from vllm.distributed import get_pp_group

        refuse_stage(self.vllm_config, get_pp_group().rank_in_group)

    return init_device


def refuse_stage(vllm_config: Any, stage: int) -> None:
    """Raises PatchError if this stage's layers use indices of another's."""
    from vllm.distributed.utils import get_pp_indices

    model_config = vllm_config.model_config
    layers = model_config.get_total_num_hidden_layers()
    config = {**model_config.hf_text_config.to_dict(), "num_hidden_layers": layers}
    stages = vllm_config.parallel_config.pipeline_parallel_size
    start, end = get_pp_indices(layers, stage, stages)
    if reason := why_not(config, start, end):
        raise PatchError(f"stage {stage} of {stages}: {reason}.")


PATCH = Patch(
    name="index_share",
    why=(
        "A stage that begins inside a group of layers that share sparse-attention indices attends "
        "with those of an earlier step, possibly to another request's keys. vLLM's own split of "
        "GLM-5.2 into two stages does."
    ),
    releases=RELEASES,
    obsolete_by="nothing up to 0.33.0",
    scope="deployment",
    wanted=lambda spec: spec.pipeline > 1,
    targets=(
        Target("vllm.v1.engine.core", "EngineCore.__init__", _refuse_before_workers_start),
        Target("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", _refuse_own_stage),
        Target("vllm.distributed.utils", "get_pp_indices"),
        Target("vllm.model_executor.models.utils", "make_layers"),
    ),
)
