"""What surrounds a vLLM engine for CPUs that runs on this machine without a launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtppp.plan.environment import CPU_HOST
from mtppp.plan.plugins import bundle


def engine_environment(packages: Sequence[str], directory: Path) -> dict[str, str]:
    """Variables with which an engine loads these plugins, as a launch would ship them.

    Writes the plugins below `directory`, which is also the engine's run directory.
    """
    plugins = directory / "plugins"
    for path, content in bundle(packages).files.items():
        file = plugins / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return {
        **CPU_HOST,
        "PYTHONPATH": str(plugins),
        "MTPPP_DEPLOYMENT": "by-hand",
        "MTPPP_RUN_DIR": str(directory),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
