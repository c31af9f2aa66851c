"""vLLM's CPU platform, with what several hosts and the V2 runner need beyond it."""

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Models whose attention is `sparse_attention`'s here."""


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
        """vLLM's choice, but for latent attention one that verifies drafts rightly, and one for
        sparse latent attention, which vLLM refuses."""
        wanted = named["attn_selector_config"] if "attn_selector_config" in named else arguments[1]
        if wanted.use_sparse and wanted.use_mla:
            return "mtppp_cpu.sparse_attention.SparseLatentBackend"
        chosen: str = super().get_attn_backend_cls(*arguments, **named)
        if chosen.rpartition(".")[2] == "CPUMLABackend":
            return "mtppp_cpu.latent_attention.DraftVerifyingBackend"
        return chosen

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Keep the scheduling asked for, and warm workers up.

        vLLM switches asynchronous scheduling off on CPU because nothing is gained by it there. But
        MTP over pipeline stages depends on it, and tests must run what is run on GPUs. For latent
        attention it also settles what its CPU kernels need; sparse attention does not run on them.
        """
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = [(scheduler, "async_scheduling")]
        if attends_sparsely(vllm_config.model_config):
            kept += [(scheduler, "enable_chunked_prefill"), (scheduler, "max_num_batched_tokens")]
            kept += [(cache, "enable_prefix_caching")]
            if cache.user_specified_block_size:
                kept += [(cache, "block_size")]
        asked = [getattr(config, name) for config, name in kept]
        super().check_and_update_config(vllm_config)
        for (config, name), value in zip(kept, asked, strict=True):
            setattr(config, name, value)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "mtppp_cpu.worker.WarmedUpWorker"


def attends_sparsely(model_config: Any) -> bool:
    """Whether a model's attention is sparse latent attention, as of DeepSeek-V3.2 and GLM-5.2."""
    return model_config is not None and model_config.hf_text_config.model_type in SPARSE
