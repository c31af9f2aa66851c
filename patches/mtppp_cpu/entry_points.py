"""The entry points of this package, for whoever makes a path entry with a `dist-info` from it.

They are declared here and not in the distribution that ships the package: installing that must not
change what a vLLM in the same environment does.
"""

from collections.abc import Mapping

ENTRY_POINTS: Mapping[str, Mapping[str, str]] = {
    # vLLM takes Triton to be usable in its CPU build if a backend has exactly this name.
    "triton.backends": {"cpu": "mtppp_cpu.triton_backend"},
    "vllm.platform_plugins": {"mtppp_cpu": "mtppp_cpu.platform_plugin:platform"},
    "vllm.general_plugins": {"mtppp_cpu": "mtppp_cpu.gaps:register"},
}
"""Entry-point group -> name -> value, as in `entry_points.txt`."""
