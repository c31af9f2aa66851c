"""The patches there are, in order of application. One file each."""

from __future__ import annotations

from mtppp_patches import attest, placement
from mtppp_patches.patch import Patch

PATCHES: tuple[Patch, ...] = (placement.PATCH, attest.PATCH)
