"""What the person who imports says beside the command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wishes:
    """What the person who imports says beside the command.

    Attributes:
        nodes: `HOST`, `USER@HOST` or `HOST=ADDRESS`.
        vllm: the release; None: the image's, or one that is proven.
        gpus: per node; None: as many as the parallel sizes need.
        gpu_type: a key of `GPU_TYPES`.
    """

    nodes: tuple[str, ...] = ()
    name: str | None = None
    vllm: str | None = None
    python: str | None = None
    gpus: int | None = None
    gpu_type: str | None = None
