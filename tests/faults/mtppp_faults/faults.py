"""The faults: what is left out of which patch, and what is put in beside it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from mtppp_faults import foreign_reads
from mtppp_patches import registry
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, Target

VARIABLE = "TEST_FAULT"
"""Names the fault, in every process."""
ALL = ("*",)

FAULTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # What public reports propose: the refusal is lifted and nothing else is done.
    "gate_only": {"draft_relay": ALL},
    # The stages stay in step, but the first one embeds zeros.
    "relay_off": {
        "draft_relay": (
            "PPHandler.receive",
            "GPUModelRunner.sample_tokens",
            "GPUModelRunner.update_pp_decode_requests",
        )
    },
    # The last stage sends drafts that nobody takes: everything after them shifts by one.
    "receive_skipped": {
        "draft_relay": ("PPHandler.receive", "GPUModelRunner.update_pp_decode_requests")
    },
    # Rows that may end in this step, judged by a count that takes every draft for accepted.
    "rows_lost": {"draft_relay": ("compute_need_sampled_mask",)},
    "embedding_off": {"drafter_weights": ALL},
    "grammar_off": {"structured_drafts": ALL},
    # A stage may begin within a group of layers that share indices.
    "index_cut": {"index_share": ALL},
    # A stage hands over its tensor-parallel ranks' shares instead of their sum.
    "boundary_off": {"stage_boundary": ALL},
}
"""Fault -> patch -> attributes that keep vLLM's source."""


def _deaf(original: Callable[..., Any], spec: EngineSpec) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        if self.is_last_pp_rank:
            # What warms an engine up ends as it should.
            heard = {name for name in scheduler_output.finished_req_ids if "warmup" in name}
            scheduler_output = dataclasses.replace(scheduler_output, finished_req_ids=heard)
        return original(self, scheduler_output, *rest, **named)

    return execute_model


def _garbling(original: Callable[..., Any], spec: EngineSpec) -> Callable[..., Any]:
    def execute_model(self: Any, *given: Any, **named: Any) -> Any:
        if self.is_last_pp_rank and "sample" not in vars(self):
            sample = self.sample

            def garbled(*batch: Any) -> Any:
                sampled, *counts = sample(*batch)
                sampled.sampled_token_ids[:, 0] ^= 1
                return sampled, *counts

            self.sample = garbled
        return original(self, *given, **named)

    return execute_model


def _mixing(original: Callable[..., Any], spec: EngineSpec) -> Callable[..., Any]:
    def on_req_idx_freed(self: Any, req_idx: int) -> None:
        return

    return on_req_idx_freed


ADDED: Mapping[str, tuple[str, Target]] = {
    # No slot counts as freed: what one request sampled and drafted is taken for the next one's.
    "slots_mixed": (
        "draft_relay",
        Target("vllm.v1.worker.gpu.pp_utils", "PPHandler.on_req_idx_freed", _mixing),
    ),
    # The last stage does not hear which requests have ended, as if a message were lost.
    "deaf_to_ends": (
        "invariants",
        Target("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", _deaf),
    ),
    # All ranks agree, and the first token of each step is its neighbour in the vocabulary.
    "garbled": (
        "invariants",
        Target("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", _garbling),
    ),
}
"""Fault -> patch behind whose replacements it is put, and what it replaces."""


VARIABLES: Mapping[str, Mapping[str, str]] = {
    # Sound, and not what was planned: the ranks of two stages hold other layers.
    "cut_elsewhere": {"VLLM_PP_LAYER_PARTITION": "4,2"},
}
"""Fault -> variables that every process has otherwise than its node was told."""


def register() -> None:
    """Take out or put in what TEST_FAULT names; a `vllm.general_plugins` entry point."""
    fault = os.environ[VARIABLE]
    if fault in VARIABLES:
        os.environ.update(VARIABLES[fault])
        return
    left_out = FAULTS.get(fault, {})
    host, target = ADDED.get(fault, ("", None))
    if not left_out and target is None:
        raise KeyError(fault)
    if fault == "index_cut":
        foreign_reads.watch()
    registry.PATCHES = tuple(
        with_target(patch, target)
        if target is not None and patch.name == host
        else without(patch, left_out.get(patch.name, ()))
        for patch in registry.PATCHES
    )


def with_target(patch: Patch, target: Target) -> Patch:
    """The same patch, and `target` around its own replacements."""
    return dataclasses.replace(patch, targets=(*patch.targets, target))


def without(patch: Patch, attributes: tuple[str, ...]) -> Patch:
    """The same patch, some of its targets only leaned on."""
    targets = tuple(
        dataclasses.replace(target, replace=None)
        if attributes == ALL or target.attribute in attributes
        else target
        for target in patch.targets
    )
    return dataclasses.replace(patch, targets=targets)
