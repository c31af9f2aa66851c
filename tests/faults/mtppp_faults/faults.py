"""The faults: which replacements of which patch are left out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from mtppp_patches import registry
from mtppp_patches.patch import Patch

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
}
"""Fault -> patch -> attributes that keep vLLM's source."""


def register() -> None:
    """Take out what MTPPP_FAULT names; a `vllm.general_plugins` entry point."""
    fault = FAULTS[os.environ["MTPPP_FAULT"]]
    registry.PATCHES = tuple(
        without(patch, fault.get(patch.name, ())) for patch in registry.PATCHES
    )


def without(patch: Patch, attributes: tuple[str, ...]) -> Patch:
    """The same patch, some of its targets only leaned on."""
    targets = tuple(
        dataclasses.replace(target, replace=None)
        if attributes == ALL or target.attribute in attributes
        else target
        for target in patch.targets
    )
    return dataclasses.replace(patch, targets=targets)
