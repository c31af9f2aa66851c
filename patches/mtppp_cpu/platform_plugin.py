"""The function that vLLM calls, in each of its processes, to learn whether to use this platform.

vLLM swallows what such a function raises and goes on with another platform. A refusal must not end
like that, so it is a platform, too: one that cannot be made (`refusal`).
"""

import os

from vllm.platforms import vllm_version_matches_substr

from mtppp_cpu import request


def platform() -> str | None:
    """The qualified name of the platform to use, or None to leave the choice to vLLM."""
    if not request.is_requested():
        return None
    if request.gpus() or not is_cpu_build():
        return "mtppp_cpu.refusal.RefusedPlatform"
    # vLLM compiles helper functions with torch even where the model itself runs eagerly. That wants
    # a C++ compiler on the host and takes longer than it saves. torch reads this as it decorates a
    # function; vLLM's decorators ask for the platform first, and so come after this.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return "mtppp_cpu.platform.CpuHostPlatform"


def is_cpu_build() -> bool:
    """Whether the vLLM installed has CPU kernels, as vLLM itself decides it: by its version."""
    return bool(vllm_version_matches_substr("cpu"))
