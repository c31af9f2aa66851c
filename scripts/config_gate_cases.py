"""Make vLLM's configuration classes for each MTP family in this process; see `config_gate.py`.

    config_gate_cases.py RELEASE shipped|patched [MODEL_TYPE]

Prints one JSON object: model_type -> "passes", "refused", or why its configuration cannot be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches")]

from transformers import AutoConfig, PretrainedConfig  # noqa: E402
from vllm.config import ModelConfig, ParallelConfig  # noqa: E402
from vllm.config.speculative import SpeculativeConfig  # noqa: E402
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
# model_type -> what is beyond SIZES. A family that the installed transformers, or the release,
# does not know is reported as such.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        **LATENT,
    },
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8},
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"], **LATENT},
    "mimo": {"architectures": ["MiMoForCausalLM"]},
    "mimo_v2": {"architectures": ["MiMoV2ForCausalLM"]},
    "ernie4_5_moe": {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 8},
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M*-E",
        "mtp_hybrid_override_pattern": "*E",
    },
    "exaone_moe": {"architectures": ["ExaoneMoeForCausalLM"]},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5_moe_text": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "mtp_num_hidden_layers": 1,
    },
    "longcat_flash": {
        "architectures": ["LongcatFlashForCausalLM"],
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "expert_ffn_hidden_size": 64,
        **LATENT,
    },
    "minimax_m3_vl": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {**SIZES, "num_mtp_modules": 1},
    },
    "bailing_hybrid": {"architectures": ["BailingMoeV2_5ForCausalLM"], "layer_group_size": 4},
    "kimi_k3": {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {**SIZES, **LATENT},
    },
    "pangu_ultra_moe": {"architectures": ["PanguUltraMoEForCausalLM"], **LATENT},
    "step3p5": {"architectures": ["Step3p5ForCausalLM"]},
    "hy_v3": {"architectures": ["HYV3ForCausalLM"], "num_experts": 8},
    "hy_v4": {"architectures": ["HYV4ForCausalLM"], "num_experts": 8, **LATENT},
    "dots3_note": {"architectures": ["Dots3NoteForCausalLM"], **LATENT},
    "qwen4_exp_text": {"architectures": ["Qwen4ExpForCausalLM"], "mtp_num_hidden_layers": 1},
}


# Published with code of their own, for which a bare configuration stands in.
WITHOUT_CLASS = ("mimo", "mimo_v2", "bailing_hybrid", "pangu_ultra_moe")


def main() -> None:
    """Run the command line."""
    release, how, *only = sys.argv[1:]
    # Only the result on stdout, whatever the classes print.
    with contextlib.redirect_stdout(sys.stderr):
        if how == "patched":
            patch(release)
        for model_type in WITHOUT_CLASS:
            bare = type(model_type, (PretrainedConfig,), {"model_type": model_type})
            AutoConfig.register(model_type, bare)
        # One import of vLLM's models for all families, instead of a process for each.
        registry._run_in_subprocess = lambda function: function()
        results = {
            model_type: outcome(directory, tensor, tokens)
            for model_type, directory, tensor, tokens in cases()
            if not only or model_type in only
        }
    print(json.dumps(results))


def patch(release: str) -> None:
    """Install the patch as in a deployment, where this release needs it."""
    spec = EngineSpec(release, PUBLISHED, pipeline=2, tensor=8, speculative=Speculative("mtp", 5))
    needed = (config_gate.PATCH,) if config_gate.PATCH.needed(spec) else ()
    spec = dataclasses.replace(spec, patches=tuple(patch.name for patch in needed))
    install(needed, spec, release, vllm_root())


def cases() -> Iterator[tuple[str, Path, int, int]]:
    """model_type, directory with its config.json, TP, draft tokens."""
    yield PUBLISHED, GLM, 8, 5
    with tempfile.TemporaryDirectory() as name:
        for model_type, more in FAMILIES.items():
            directory = Path(name) / model_type
            directory.mkdir()
            config = {"model_type": model_type, **SIZES, **more}
            (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield model_type, directory, 2, 1


def outcome(directory: Path, tensor: int, tokens: int) -> str:
    """ "passes", "refused", or why the configuration cannot be made here."""
    try:
        model = ModelConfig(
            model=str(directory),
            runner="generate",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
        )
        parallel = ParallelConfig(
            pipeline_parallel_size=2,
            tensor_parallel_size=tensor,
            distributed_executor_backend="ray",
        )
    except Exception as error:
        return f"not made: {first_line(error)}"
    try:
        SpeculativeConfig(
            target_model_config=model,
            target_parallel_config=parallel,
            model=str(directory),
            method="mtp",
            num_speculative_tokens=tokens,
        )
    except NotImplementedError as error:
        return "refused" if "SupportsPP" in str(error) else f"not made: {first_line(error)}"
    except Exception as error:
        return f"not made: {first_line(error)}"
    return "passes"


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:160]}"


if __name__ == "__main__":
    main()
