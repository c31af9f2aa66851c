"""What of each patch must be in place in a rank that serves.

A replacement is made when a process imports the module it is in. A rank that never imports one may
have no use for it, or may run something else in its place, unpatched: which of the two is decided
here, for what can be told of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtppp_patches import drafter_weights
from mtppp_patches.patch import Patch

_IN_EACH_RANK = "vllm.v1.worker."


def lacking(
    patch: Patch, release: str, in_place: frozenset[str], *, last_stage: bool
) -> tuple[str, ...]:
    """What a rank that serves lacks of a patch, in words; () when nothing. Pure.

    Args:
        in_place: names ("module:attribute") of the targets that the rank has replaced.
        last_stage: whether the rank is of the last stage, where the drafter is.
    """
    replaced = tuple(
        target
        for target in patch.targets
        if target.replace is not None and target.exists_in(release)
    )
    names = tuple(target.name for target in replaced)
    if patch.scope == "decode":
        # Each rank sends, receives or verifies drafts, and imports what schedules them.
        return tuple(_absent(names, in_place))
    if patch.scope == "model":
        # The targets are one class per platform or release: a rank has one of them.
        concerned = last_stage or patch.name != drafter_weights.PATCH.name
        some = not concerned or any(name in in_place for name in names)
        return () if some else (f"none of {', '.join(names)}",)
    # Of the others a part is for the engine's process, or for the API server.
    of_ranks = (target.name for target in replaced if target.module.startswith(_IN_EACH_RANK))
    return tuple(_absent(tuple(of_ranks), in_place))


def _absent(names: tuple[str, ...], in_place: frozenset[str]) -> Iterator[str]:
    return (name for name in names if name not in in_place)
