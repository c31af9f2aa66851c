"""vLLM's CPU platform, with what several hosts and the V2 runner need beyond it."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuHostPlatform(CpuPlatform):
    """Each attribute and method here replaces one whose value in vLLM rules a CPU host out."""

    # vLLM's Ray executor schedules workers by this resource and refuses a platform without one. It
    # also asks Ray for the ids of the devices assigned, which Ray keeps for the accelerators it
    # knows only: so a CPU host poses as one with GPUs (`ray start --num-gpus=N` for N workers).
    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "mtppp_cpu.communicator.CrossHostCommunicator"

    @classmethod
    def get_attn_backend_cls(cls, *arguments: Any, **named: Any) -> str:
        """vLLM's choice, but for latent attention one that verifies drafts rightly."""
        chosen: str = super().get_attn_backend_cls(*arguments, **named)
        if chosen.rpartition(".")[2] == "CPUMLABackend":
            return "mtppp_cpu.latent_attention.DraftVerifyingBackend"
        return chosen

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Keep the scheduling asked for, and warm workers up.

        vLLM switches asynchronous scheduling off on CPU because nothing is gained by it there. But
        MTP over pipeline stages depends on it, and tests must run what is run on GPUs.
        """
        scheduler = vllm_config.scheduler_config
        asked = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = asked
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "mtppp_cpu.worker.WarmedUpWorker"
