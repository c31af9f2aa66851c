"""Whether this process is one of a deployment on CPU hosts, and whether its host has a GPU.

Read in every process that imports Triton or vLLM, so it imports neither, nor torch: asking
`torch.cuda` would initialise a driver that worker processes must initialise themselves.
"""

import os
from collections.abc import Mapping
from pathlib import Path

DEPLOYMENT = "MTPPP_DEPLOYMENT"
"""Names the deployment a process belongs to; every process that mtppp starts has it."""

DEVICE = "MTPPP_DEVICE"
"""What the deployment runs on; `cpu` asks for this package."""

# What a process needs to be able to use a GPU. `/dev/dri` is none of it: integrated and virtual
# graphics have that, too.
GPU_DEVICES = (
    "dev/nvidia[0-9]*",  # NVIDIA
    "dev/nvgpu",  # NVIDIA Jetson
    "usr/lib/wsl/lib/libcuda.so*",  # NVIDIA in WSL, put there by the driver on the Windows side
    "dev/kfd",  # AMD
)


def is_requested(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(DEVICE) == "cpu" and bool(environment.get(DEPLOYMENT))


def gpus(root: Path = Path("/")) -> list[Path]:
    """What shows that this host has a GPU, sorted; empty if it has none."""
    return sorted(path for pattern in GPU_DEVICES for path in root.glob(pattern))


def is_active() -> bool:
    return is_requested() and not gpus()
