"""Has an engine on CPUs take vLLM's NVIDIA classes of GLM-5.2 and DeepSeek-V3.2."""

from __future__ import annotations


def register() -> None:
    """Take them; a `vllm.general_plugins` entry point, called any number of times."""
    from mtppp_cpu import sparse_attention

    # Before any model's module is imported.
    sparse_attention.install()
    # What the backends of GPUs say of a step without prompts, which is what all steps are here.
    sparse_attention.SparseMetadata.prefill = None  # type: ignore[attr-defined]

    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.models.deepseek_v32 import attention
    from vllm.models.deepseek_v32.nvidia import model, mtp

    from mtppp_gpu_classes import operators

    attention.fused_norm_rope = operators.fused_norm_rope
    attention.fused_q = operators.fused_q
    attention.sparse_attn_indexer = operators.sparse_attn_indexer
    mtp.fused_eh_norm = operators.fused_eh_norm
    ModelRegistry.register_model("GlmMoeDsaForCausalLM", model.DeepseekV32ForCausalLM)
    ModelRegistry.register_model("DeepseekV32ForCausalLM", model.DeepseekV32ForCausalLM)
    ModelRegistry.register_model("DeepseekV32MTPModel", mtp.DeepseekV32MTP)
