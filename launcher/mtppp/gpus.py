"""GPU types that a cluster file may name, so that a Plan knows their memory before a host is asked.

Memory is what the driver shows (`nvidia-smi`, memory.total, ECC as shipped), which is what a host
answers later; CUDA itself reports up to 1 % less. Read in public outputs of nvidia-smi, 2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GpuType:
    """One type: bytes of memory, compute capability such as "9.0"."""

    memory: int
    compute_capability: str


GPU_TYPES: Mapping[str, GpuType] = {
    "A100-40GB": GpuType(40_960 * MIB, "8.0"),
    "A100-80GB": GpuType(81_920 * MIB, "8.0"),
    "L40S": GpuType(46_068 * MIB, "8.9"),
    "H100-80GB": GpuType(81_559 * MIB, "9.0"),
    "H100-NVL": GpuType(95_830 * MIB, "9.0"),
    "H20": GpuType(97_871 * MIB, "9.0"),
    "H200": GpuType(143_771 * MIB, "9.0"),
    "B200": GpuType(183_359 * MIB, "10.0"),
}
