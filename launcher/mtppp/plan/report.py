"""A review as plain data: what `mtppp plan --json` prints. Numbers of bytes are per GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mtppp.plan.memory import StageMemory
from mtppp.plan.partition import vllm_default
from mtppp.plan.review import Review


def report(review: Review) -> dict[str, Any]:
    """The whole review; equal reviews give equal data, and nothing in it is secret."""
    return {
        "plan": asdict(review.plan),
        "partition": {
            "layers": list(review.cut.counts),
            "vllm_default": list(vllm_default(review.model.layer_count, review.plan.pipeline)),
            "why": list(review.cut.why),
        },
        "memory": _memory(review),
        "evidence": {what: asdict(proof) for what, proof in review.admission.proofs.items()},
        "refusals": [asdict(refusal) for refusal in review.refusals],
        "defaults": asdict(review.defaults),
        "times": {
            **asdict(review.times),
            "from_disk": review.times.from_disk,
            "over_network": review.times.over_network,
        },
        "warnings": [asdict(warning) for warning in review.warnings],
        "unknowns": list(review.unknowns),
        "placeholders": list(review.placeholders),
    }


def _memory(review: Review) -> Mapping[str, Any] | None:
    memory = review.memory
    if memory is None:
        return None
    known = review.fullest is not None
    length = review.serving.max_model_len
    return {
        "max_model_len": length,
        "fits": memory.fits if known else None,
        "tokens": memory.tokens if known else None,
        "requests": _finite(memory.concurrency(length)) if known and length else None,
        "largest_max_model_len": memory.largest_max_model_len if known else None,
        "fullest_stage": review.fullest,
        "stages": [_stage(review, stage) for stage in memory.stages],
    }


def _stage(review: Review, stage: StageMemory) -> Mapping[str, Any]:
    gpu = review.gpus[stage.index]
    length = review.serving.max_model_len
    return {
        "stage": stage.index,
        "gpu": review.gpu_names[stage.index] or None,
        "gpu_bytes": gpu.memory if gpu else None,
        "utilisation": gpu.utilisation if gpu else None,
        "allowance_bytes": gpu.overhead if gpu else None,
        "budget_bytes": stage.budget if gpu else None,
        "resident_bytes": stage.weights,
        "parts": [asdict(part) for part in stage.parts],
        "replicated": [asdict(part) for part in stage.replicated],
        "cache_bytes_per_token": stage.cache_per_token,
        "cache_bytes_per_request": stage.cache_per_request,
        "free_bytes": stage.free if gpu else None,
        "tokens": stage.tokens if gpu else None,
        "requests": _finite(stage.requests(length)) if gpu and length else None,
        "headroom_bytes": headroom(stage, length) if gpu and length else None,
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def headroom(stage: StageMemory, max_model_len: int) -> int:
    """Bytes left beside the weights and one request of full length; negative: it does not fit."""
    return stage.free - stage.cache_per_request - max_model_len * stage.cache_per_token
