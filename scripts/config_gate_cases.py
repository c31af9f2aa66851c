"""Make vLLM's configuration classes for each MTP family in this process; see `config_gate.py`.

    config_gate_cases.py RELEASE shipped|patched [MODEL_TYPE]

Prints one JSON object: model_type -> "passes", "refused", "unknown" where the release's
MTPModelTypes has no such family, or why its configuration cannot be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches")]

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig  # noqa: E402

# What vLLM's classes import and no configuration calls: kernels of GPUs and what is compiled of
# them, torchvision, which PyPI has for GPUs alone, and the reader of a format of weights.
NEVER_CALLED = (
    "gguf",
    "gguf.constants",
    "gguf.quants",
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    "vllm.third_party.deep_gemm",
    "vllm.v1.attention.backends.fa_utils",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
)
sys.modules.update((name, MagicMock(name=name)) for name in NEVER_CALLED)

from vllm.config import ModelConfig, ParallelConfig  # noqa: E402
from vllm.config.speculative import MTPModelTypes, SpeculativeConfig  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

from mtppp_patches import config_gate  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Speculative  # noqa: E402
from mtppp_patches.patch import install, vllm_root  # noqa: E402

GLM = ROOT / "launcher/mtppp/model/catalogue/zai-org--GLM-5.2-FP8"
PUBLISHED = "glm_moe_dsa"

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Case:
    """What to make configuration classes of: directories with a config.json, and sizes."""

    mtp: str
    target: Path
    draft: Path
    tensor: int
    tokens: int


@dataclass(frozen=True)
class Family:
    """The smallest configuration of a family with MTP."""

    mtp: str
    """Its name in vLLM's MTPModelTypes."""
    architecture: str
    more: dict[str, Any] = field(default_factory=dict)
    """What is beyond SIZES."""
    text: dict[str, Any] | None = None
    """What its text_config has beyond SIZES, which then are there."""
    draft: dict[str, Any] | None = None
    """The configuration of a drafter that is published beside the model."""

    def config(self, model_type: str) -> dict[str, Any]:
        """Its config.json."""
        named = {"model_type": model_type, "architectures": [self.architecture], **self.more}
        if self.text is None:
            return {**SIZES, **named}
        return {**named, "torch_dtype": "bfloat16", "text_config": {**SIZES, **self.text}}


LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
# The names of vLLM's MTPModelTypes are all here, but for the bare "mtp".
FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family("deepseek_mtp", "DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": Family(
        "deepseek_mtp",
        "DeepseekV32ForCausalLM",
        {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64, **LATENT},
    ),
    "glm4_moe": Family("glm4_moe_mtp", "Glm4MoeForCausalLM", {"n_routed_experts": 8}),
    "glm4_moe_lite": Family("glm4_moe_lite_mtp", "Glm4MoeLiteForCausalLM", LATENT),
    "glm_ocr": Family("glm_ocr_mtp", "GlmOcrForConditionalGeneration", text={}),
    "glm5_next": Family(
        "glm5_next_mtp",
        "Glm5NextForConditionalGeneration",
        text={**LATENT, "linear_num_heads": 4, "head_dim": 0, "qk_rope_head_dim": 0},
    ),
    "mimo": Family("mimo_mtp", "MiMoForCausalLM"),
    "mimo_v2": Family("mimo_v2_mtp", "MiMoV2ForCausalLM"),
    "ernie4_5_moe": Family("ernie_mtp", "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 8}),
    "nemotron_h": Family(
        "nemotron_h_mtp",
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*-E", "mtp_hybrid_override_pattern": "*E"},
    ),
    "exaone_moe": Family("exaone_moe_mtp", "ExaoneMoeForCausalLM"),
    "exaone4_5": Family(
        "exaone4_5_mtp",
        "Exaone4_5_ForConditionalGeneration",
        {"num_nextn_predict_layers": 1},
        text={},
    ),
    "qwen3_next": Family("qwen3_next_mtp", "Qwen3NextForCausalLM"),
    "qwen3_5_moe": Family(
        "qwen3_5_mtp",
        "Qwen3_5MoeForConditionalGeneration",
        text={"mtp_num_hidden_layers": 1, **LINEAR},
    ),
    "qwen4_exp": Family(
        "qwen4_exp_mtp",
        "Qwen4ExpForConditionalGeneration",
        text={"mtp_num_hidden_layers": 1, **LINEAR},
    ),
    "longcat_flash": Family(
        "longcat_flash_mtp",
        "LongcatFlashForCausalLM",
        {"num_layers": 2, "ffn_hidden_size": 256, "expert_ffn_hidden_size": 64, **LATENT},
    ),
    "minimax_m3_vl": Family(
        "minimax_m3_mtp", "MiniMaxM3SparseForConditionalGeneration", text={"num_mtp_modules": 1}
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid_mtp", "BailingMoeV2_5ForCausalLM", {"layer_group_size": 4}
    ),
    "bailing_hybrid_v3": Family(
        "bailing_hybrid_v3_mtp", "BailingMoeV3ForCausalLM", {"layer_group_size": 4, **LATENT}
    ),
    "kimi_k3": Family("kimi_k3_mtp", "KimiK3ForConditionalGeneration", text=LATENT),
    "pangu_ultra_moe": Family("pangu_ultra_moe_mtp", "PanguUltraMoEForCausalLM", LATENT),
    "step3p5": Family("step3p5_mtp", "Step3p5ForCausalLM"),
    "step5": Family("step5_mtp", "Step5ForCausalLM"),
    "hy_v3": Family("hy_v3_mtp", "HYV3ForCausalLM", {"num_experts": 8}),
    "hy_v4": Family("hy_v4_mtp", "HYV4ForCausalLM", {"num_experts": 8, **LATENT}),
    "dots3_note": Family(
        "dots3_note_mtp",
        "Dots3NoteForCausalLM",
        {"layer_types": ["full_attention", "sliding_attention"] * 2, **LATENT},
    ),
    "inkling_mm_model": Family(
        "inkling_mtp",
        "InklingForConditionalGeneration",
        {"mtp_config": {"num_nextn_predict_layers": 1}},
        text={},
    ),
    "gemma4": Family(
        "gemma4_mtp",
        "Gemma4ForConditionalGeneration",
        text={"global_head_dim": SIZES["head_dim"]},
        draft={
            "model_type": "gemma4_assistant",
            "architectures": ["Gemma4AssistantForCausalLM"],
            "text_config": {
                **SIZES,
                "global_head_dim": SIZES["head_dim"],
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "num_kv_shared_layers": 4,
            },
        },
    ),
}

# Published with code of their own, for which a bare configuration stands in where transformers
# has none.
WITHOUT_CLASS = ("mimo", "mimo_v2", "bailing_hybrid", "bailing_hybrid_v3", "pangu_ultra_moe")


def main() -> None:
    """Run the command line."""
    release, how = sys.argv[1:]
    # Only the result on stdout, whatever the classes print.
    with contextlib.redirect_stdout(sys.stderr):
        if how == "patched":
            patch(release)
        for model_type in WITHOUT_CLASS:
            if model_type not in CONFIG_MAPPING:
                bare = type(model_type, (PretrainedConfig,), {"model_type": model_type})
                AutoConfig.register(model_type, bare)
        # One import of vLLM's models for all families, instead of a process for each.
        registry._run_in_subprocess = lambda function: function()
        results = {model_type: outcome(case) for model_type, case in cases()}
        results |= dict.fromkeys(unwritten(), "not made: its configuration is not written here")
    print(json.dumps(results))


def patch(release: str) -> None:
    """Install the patch as in a deployment, where this release needs it."""
    spec = EngineSpec(release, PUBLISHED, pipeline=2, tensor=8, speculative=Speculative("mtp", 5))
    needed = (config_gate.PATCH,) if config_gate.PATCH.needed(spec) else ()
    spec = dataclasses.replace(spec, patches=tuple(patch.name for patch in needed))
    install(needed, spec, release, vllm_root())


def cases() -> Iterator[tuple[str, Case]]:
    """Per model_type what to make."""
    yield PUBLISHED, Case("deepseek_mtp", GLM, GLM, tensor=8, tokens=5)
    with tempfile.TemporaryDirectory() as name:
        for model_type, family in FAMILIES.items():
            target = written(Path(name) / model_type, family.config(model_type))
            draft = target
            if family.draft is not None:
                draft = written(Path(name) / f"{model_type}-draft", family.draft)
            yield model_type, Case(family.mtp, target, draft, tensor=2, tokens=1)


def unwritten() -> set[str]:
    """MTP families of this release that FAMILIES has not."""
    return set(get_args(MTPModelTypes)) - {"mtp"} - {family.mtp for family in FAMILIES.values()}


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def outcome(case: Case) -> str:
    """ "passes", "refused", "unknown" to this release, or why it cannot be made here."""
    if case.mtp not in get_args(MTPModelTypes):
        return "unknown"
    try:
        model = ModelConfig(
            model=str(case.target),
            runner="generate",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
        )
        parallel = ParallelConfig(
            pipeline_parallel_size=2,
            tensor_parallel_size=case.tensor,
            distributed_executor_backend="ray",
        )
        speculative = SpeculativeConfig(
            target_model_config=model,
            target_parallel_config=parallel,
            model=str(case.draft),
            method="mtp",
            num_speculative_tokens=case.tokens,
        )
    except Exception as error:
        if isinstance(error, NotImplementedError) and "SupportsPP" in str(error):
            return "refused"
        return f"not made: {first_line(error)}"
    drafter = speculative.draft_model_config.hf_config.model_type
    return "passes" if drafter == case.mtp else f"not made: the drafter is a {drafter}"


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:160]}"


if __name__ == "__main__":
    main()
