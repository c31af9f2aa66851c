"""The patches there are, in order of application. One file each."""

from __future__ import annotations

from mtppp_patches import (
    attest,
    config_gate,
    draft_relay,
    drafter_weights,
    engine_guard,
    index_share,
    invariants,
    placement,
    stage_boundary,
    structured_drafts,
)
from mtppp_patches.assumptions import with_assumptions
from mtppp_patches.patch import Patch

_IN_ORDER = (
    engine_guard.PATCH,
    config_gate.PATCH,
    draft_relay.PATCH,
    drafter_weights.PATCH,
    structured_drafts.PATCH,
    stage_boundary.PATCH,
    index_share.PATCH,
    invariants.PATCH,
    placement.PATCH,
    attest.PATCH,
)

PATCHES: tuple[Patch, ...] = tuple(with_assumptions(patch) for patch in _IN_ORDER)
