"""The families at the demo's size, and their multi-token-prediction layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeRMSNorm,
    Glm4MoeTopkRouter,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaTopkRouter,
)

from demo_model import text
from demo_model.data import VOCABULARY

HIDDEN = 128
LAYERS = 6


@dataclass(frozen=True)
class Family:
    """The classes transformers has for a model type, and the sizes the demo gives it."""

    config: PreTrainedConfig
    model: type[PreTrainedModel]
    layer: type[nn.Module]
    norm: type[nn.Module]
    router: type[nn.Module]


def common_sizes() -> dict[str, Any]:
    """Sizes of all families: heads, experts and intermediate sizes divide by TP 4."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "bos_token_id": text.SPECIAL_TOKENS.index(text.BOS),
        "eos_token_id": text.SPECIAL_TOKENS.index(text.EOS),
        "pad_token_id": text.SPECIAL_TOKENS.index(text.PAD),
        "attn_implementation": "sdpa",
        "dtype": "float32",
    }


def glm4_moe() -> Family:
    """GLM-4.5's layout: grouped-query attention with biases, sigmoid routing."""
    config = Glm4MoeConfig(
        **common_sizes(),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return Family(
        config, Glm4MoeForCausalLM, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeTopkRouter
    )


def deepseek_v3() -> Family:
    """DeepSeek-V3's layout: multi-head latent attention, YaRN, sigmoid routing by groups.

    vLLM's CPU kernel for latent attention exists only for DeepSeek's own latent size, 512 + 64, and
    on CPUs its rotary embedding is wrong for this attention unless it is of the type YaRN, as
    DeepSeek's own is. With a factor of 1 YaRN rotates as without.
    """
    config = DeepseekV3Config(
        **common_sizes(),
        **latent_attention(),
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_group=2,
        rms_norm_eps=1e-6,
    )
    return Family(
        config,
        DeepseekV3ForCausalLM,
        DeepseekV3DecoderLayer,
        DeepseekV3RMSNorm,
        DeepseekV3TopkRouter,
    )


def glm_moe_dsa() -> Family:
    """GLM-5.2's layout: sparse latent attention, indices shared between layers and by drafts.

    As many layers as it takes for three groups that share: 2 to 5, 6 to 9, 10 and 11. Latents and
    index keys are of the sizes that vLLM has, and rotated as for `deepseek_v3`.
    """
    sizes = common_sizes() | {
        "num_hidden_layers": 12,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        # The weights of attention teach the indexers, and other implementations return none.
        "attn_implementation": "eager",
    }
    config = GlmMoeDsaConfig(
        **sizes,
        **latent_attention(),
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=64,
        index_n_heads=4,
        index_head_dim=128,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        index_share_for_mtp_iteration=True,
        indexer_rope_interleave=True,
        n_group=1,
        rms_norm_eps=1e-5,
    )
    return Family(
        config,
        GlmMoeDsaForCausalLM,
        GlmMoeDsaDecoderLayer,
        GlmMoeDsaRMSNorm,
        GlmMoeDsaTopkRouter,
    )


def latent_attention() -> dict[str, Any]:
    """What DeepSeek's layout and its descendant have in common: latents, rotation, routing."""
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        # Rotates as without.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


FAMILIES: dict[str, Callable[[], Family]] = {
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "glm_moe_dsa": glm_moe_dsa,
}


class MtpLayer(nn.Module):
    """The multi-token-prediction layer: drafts from a hidden state and the token after it."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        config = family.config
        self._adds_mask = config._attn_implementation == "eager"
        self.enorm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = family.layer(config, self._layer_like(config))
        self.block.self_attn.layer_idx = 0  # its place in the cache of `draft_losses`
        self.norm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        # vLLM feeds the next draft this layer's output from before this norm (glm4_moe) or from
        # after it (deepseek_v3). With unit weights `hnorm` makes the same of both.
        self.norm.weight.requires_grad_(requires_grad=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)

    @staticmethod
    def _layer_like(config: PreTrainedConfig) -> int:
        """A layer with experts, as vLLM has it, and with sparse attention one with an indexer."""
        layers = range(config.first_k_dense_replace, config.num_hidden_layers)
        indexers = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
        return max(layer for layer in layers if indexers[layer] == "full")

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        if self._adds_mask:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        output: Tensor | tuple[Tensor, Tensor] = self.block(
            joined,
            attention_mask=mask,
            position_embeddings=position_embeddings,
            past_key_values=cache,
        )
        # A layer with sparse attention also returns what it attended to.
        return output[0] if isinstance(output, tuple) else output
