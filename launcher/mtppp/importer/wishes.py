"""What the person who imports says beside the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Wishes:
    """What the person who imports says beside the command.

    Attributes:
        nodes: `HOST`, `USER@HOST` or `HOST=ADDRESS`.
        vllm: the release; None: the image's, or one that is proven.
        gpus: per node; None: as many as the parallel sizes need.
        gpu_type: a key of `GPU_TYPES`.
        device: None: CPUs where the command is plainly for them.
        managed: mtppp is to make the environment that has vLLM; `python` is then what it is made
            with, None: the default.
        ssh_config: to reach the nodes with; None: the operator's own.
    """

    nodes: tuple[str, ...] = ()
    name: str | None = None
    vllm: str | None = None
    python: str | None = None
    gpus: int | None = None
    gpu_type: str | None = None
    device: Device | None = None
    managed: bool = False
    ssh_config: Path | None = None
