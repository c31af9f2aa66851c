from __future__ import annotations

from typing import Any

import pytest
from published import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    GLM_4_5,
    GLM_4_5_AIR,
    GLM_4_7_FLASH,
    MIMO_7B,
    MIMO_V2_FLASH,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)

from mtppp.errors import ConfigurationError
from mtppp.model.config import find_config
from mtppp.model.drafters import drafter
from mtppp.model.facts import ModelFacts, read_facts


@pytest.fixture(scope="module")
def glm() -> ModelFacts:
    return read_facts(find_config("zai-org/GLM-5.2-FP8", environ={}).values)


class TestGlm52:
    """The published figures of GLM-5.2, each from the formula beside it."""

    def test_parameters(self, glm: ModelFacts) -> None:
        # 753.33 B is what the checkpoint's tensors sum up to, without copies of the embedding.
        hidden, vocabulary, width, experts = 6144, 154880, 2048, 256
        attention = (
            hidden * 2048  # q_a
            + 2048 * 64 * (192 + 64)  # q_b
            + hidden * (512 + 64)  # kv_a
            + 512 * 64 * (192 + 256)  # kv_b
            + 64 * 256 * hidden  # o
        )
        indexer = 2048 * 32 * 128 + hidden * 128 + hidden * 32
        moe = (experts + 1) * 3 * hidden * width + experts * hidden
        by_hand = (
            2 * vocabulary * hidden
            + 78 * attention
            + 21 * indexer
            + 3 * 3 * hidden * 12288
            + 75 * moe
            + (attention + indexer + moe + 2 * hidden * hidden)  # the MTP layer with eh_proj
        )
        assert glm.parameters is not None
        assert glm.parameters == pytest.approx(753.33e9, rel=1e-5)
        # Norms and biases are all that the sum by hand leaves out.
        assert glm.parameters == pytest.approx(by_hand, rel=1e-5)

    def test_mtp_parameters(self, glm: ModelFacts) -> None:
        # 9.95 B: one MoE layer with a full indexer, and eh_proj (2 x 6144 -> 6144).
        assert glm.mtp_parameters == pytest.approx(9.95e9, rel=1e-3)

    def test_bytes(self, glm: ModelFacts) -> None:
        # 704 GiB: one byte a weight, a float32 scale per 128 x 128 of them, two bytes for the
        # embedding, the head, the router, eh_proj and the indexer's small projections.
        assert glm.checkpoint_bytes == pytest.approx(704 * 2**30, rel=0.01)
        assert glm.checkpoint_bytes == pytest.approx(756e9, rel=0.01)

    def test_cache(self, glm: ModelFacts) -> None:
        # 656 = 512 FP8 + 4 scales of 4 bytes + 64 bfloat16 (vLLM's fp8_ds_mla row);
        # 132 = 128 FP8 + one scale, on each of the 21 full indexers; the MTP layer has both.
        assert glm.cache_bytes_per_token("fp8") == 78 * 656 + 21 * 132 == 53_940
        assert glm.cache_bytes_per_token("fp8", with_mtp=True) == 54_728

    def test_the_latent_is_whole_on_every_rank(self, glm: ModelFacts) -> None:
        assert glm.cache_bytes_per_token("fp8", tensor=8) == 53_940

    def test_layers(self, glm: ModelFacts) -> None:
        assert glm.stack is not None
        layers = glm.stack.layers
        assert [layer.index for layer in layers if layer.mlp == "dense"] == [0, 1, 2]
        full = [layer.index for layer in layers if layer.indexer == "full"]
        assert full == [0, 1, 2, *range(6, 78, 4)]
        assert [layer.indexer for layer in glm.stack.mtp] == ["full"]

    def test_nothing_is_unknown(self, glm: ModelFacts) -> None:
        assert glm.unknowns == ()
        assert glm.notes == ()


@pytest.mark.parametrize(
    ("config", "main", "mtp"),
    [
        # The model cards: 355 B, 106 B; 30 B-A3B; the 358 B that the hub shows for GLM-4.5
        # counts the MTP layer (4.0 B) and its copies of embedding and head (1.55 B).
        pytest.param(GLM_4_5, 355e9, 3.99e9, id="GLM-4.5"),
        pytest.param(GLM_4_5_AIR, 106e9, 2.38e9, id="GLM-4.5-Air"),
        pytest.param(GLM_4_7_FLASH, 30e9, 0.644e9, id="GLM-4.7-Flash"),
        # README_WEIGHTS of DeepSeek-V3: 671 B, and 11.5 B in the MTP module alone.
        pytest.param(DEEPSEEK_V3, 671e9, 11.5e9, id="DeepSeek-V3"),
        # The same and 61 indexers of 14 M each.
        pytest.param(DEEPSEEK_V3_2, 671e9 + 61 * 13.96e6, 11.5e9, id="DeepSeek-V3.2"),
        # 80 B; 35 B; 7 B: the hub shows 81.3 B and 7.83 B with MTP.
        pytest.param(QWEN3_NEXT, 81.3e9 - 1.65e9, 1.65e9, id="Qwen3-Next"),
        pytest.param(QWEN3_5_MOE, 34.7e9, 0.84e9, id="Qwen3.5-35B-A3B"),
        pytest.param(MIMO_7B, 7.83e9 - 0.21e9, 0.21e9, id="MiMo-7B"),
        pytest.param(MIMO_V2_FLASH, 309e9, 0.33e9, id="MiMo-V2-Flash"),
    ],
)
def test_published_parameters(config: dict[str, Any], main: float, mtp: float) -> None:
    facts = read_facts(config)
    assert facts.parameters is not None
    assert facts.mtp_parameters is not None
    assert facts.parameters - facts.mtp_parameters == pytest.approx(main, rel=0.01)
    assert facts.mtp_parameters == pytest.approx(mtp, rel=0.015)


def test_heads_are_spread_over_ranks_and_repeated_beyond_their_number() -> None:
    facts = read_facts(GLM_4_5_AIR)
    # 46 layers x 8 heads x (128 + 128) x 2 bytes
    assert facts.cache_bytes_per_token() == 46 * 8 * 256 * 2
    assert facts.cache_bytes_per_token("fp8", tensor=4) == 46 * 2 * 256
    assert facts.cache_bytes_per_token(tensor=8) == facts.cache_bytes_per_token(tensor=16)


def test_a_plain_latent_cache_has_no_packed_layout() -> None:
    facts = read_facts(DEEPSEEK_V3)
    assert facts.cache_bytes_per_token() == 61 * 576 * 2
    assert facts.cache_bytes_per_token("fp8") == 61 * 576


def test_linear_layers_keep_a_state_per_request() -> None:
    facts = read_facts(QWEN3_5_MOE)
    # 10 of 40 layers attend over 2 heads of 256 + 256.
    assert facts.cache_bytes_per_token() == 10 * 2 * 512 * 2
    # 30 others: 32 x 128 x 128 float32, and 3 steps of 8192 channels in bfloat16.
    one = 32 * 128 * 128 * 4 + 8192 * 3 * 2
    assert facts.cache_bytes_per_request() == 30 * one
    # Drafts need a state each to roll back to, and longer convolutions.
    with_drafts = 30 * 3 * (32 * 128 * 128 * 4 + 8192 * 5 * 2)
    assert facts.cache_bytes_per_request(drafts=2) == with_drafts


def test_qwen_gates_its_attention() -> None:
    facts = read_facts(QWEN3_NEXT)
    assert facts.stack is not None
    (query,) = (
        weight for weight in facts.stack.layers[3].weights if weight.name == "self_attn.q_proj"
    )
    # A query and a gate for each of 16 heads of 256.
    assert (query.rows, query.columns) == (2 * 16 * 256, 2048)


def test_a_tied_head_is_counted_once() -> None:
    tied = read_facts(GLM_4_5_AIR | {"tie_word_embeddings": True})
    untied = read_facts(GLM_4_5_AIR)
    assert (untied.parameters or 0) - (tied.parameters or 0) == 151552 * 4096


def test_sliding_layers_keep_a_window() -> None:
    facts = read_facts(MIMO_V2_FLASH)
    assert facts.stack is not None
    kinds = [layer.attention for layer in facts.stack.layers]
    assert kinds.count("full") == 9
    assert facts.cache_bytes_per_token() == 9 * 4 * (192 + 128) * 2
    assert facts.cache_bytes_per_request() == 39 * 128 * 8 * (192 + 128) * 2
    # Of several MTP layers vLLM loads one; it slides.
    assert [layer.attention for layer in facts.stack.mtp] == ["sliding"]


def test_modules_left_unquantised_take_two_bytes() -> None:
    quantised = read_facts(DEEPSEEK_V3)
    layer = "model.layers.5.self_attn"
    skipping = read_facts(
        DEEPSEEK_V3
        | {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": [f"{layer}.o_proj", "model.layers.50"],
            }
        }
    )
    assert quantised.stack is not None
    assert skipping.stack is not None
    output = 128 * 128 * 7168
    scales = output // 128**2 * 4
    five = skipping.layer_bytes(skipping.stack.layers[5])
    assert five is not None
    assert five - (quantised.layer_bytes(quantised.stack.layers[5]) or 0) == output - scales
    assert (skipping.layer_bytes(skipping.stack.layers[50]) or 0) > 1.9 * five


def test_unknown_family_is_said_to_be_unknown() -> None:
    facts = read_facts(
        {
            "model_type": "unheard_of",
            "architectures": ["UnheardOfForCausalLM"],
            "num_hidden_layers": 12,
            "hidden_size": 64,
            "num_nextn_predict_layers": 1,
            "dtype": "bfloat16",
        }
    )
    assert facts.parameters is None
    assert facts.checkpoint_bytes is None
    assert facts.cache_bytes_per_token() is None
    assert facts.layer_count == 12
    assert facts.mtp_layers == 1
    assert not facts.couplings.known
    unknown = "\n".join(facts.unknowns)
    for what in ("weights and cache", "couplings", "drafter"):
        assert what in unknown


def test_a_missing_key_is_named() -> None:
    config = {key: value for key, value in GLM_4_5_AIR.items() if key != "moe_intermediate_size"}
    facts = read_facts(config)
    assert facts.parameters is None
    assert any("moe_intermediate_size" in unknown for unknown in facts.unknowns)


def test_an_unread_quantisation_leaves_bytes_unknown_but_not_parameters() -> None:
    facts = read_facts(GLM_4_5_AIR | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert facts.parameters == read_facts(GLM_4_5_AIR).parameters
    assert facts.checkpoint_bytes is None
    assert any("awq" in unknown for unknown in facts.unknowns)


def test_no_models_configuration() -> None:
    with pytest.raises(ConfigurationError, match="num_hidden_layers"):
        read_facts({"architectures": ["Whatever"]})


def test_an_unknown_cache_type_is_no_guess() -> None:
    with pytest.raises(ConfigurationError, match="nvfp4"):
        read_facts(GLM_4_5_AIR).cache_bytes_per_token("nvfp4")


@pytest.mark.parametrize(
    ("config", "release", "architecture"),
    [
        ({"model_type": "glm_moe_dsa"}, "0.28.0", "DeepSeekMTPModel"),
        ({"model_type": "glm_moe_dsa"}, "0.29.0", "DeepseekV32MTPModel"),
        ({"model_type": "glm_moe_dsa"}, "0.33.0", "DeepseekV32MTPModel"),
        ({"model_type": "glm_moe_dsa"}, "0.22.0", None),
        ({"model_type": "glm_moe_dsa"}, "0.34.0", None),
        ({"model_type": "glm_moe_dsa"}, "nightly", None),
        ({"model_type": "deepseek_v3"}, "0.33.0", "DeepSeekMTPModel"),
        ({"model_type": "qwen3_5_moe_text"}, "0.27.1", None),
        ({"model_type": "qwen3_5_moe_text"}, "0.28.0", "Qwen3_5MoeMTP"),
        (
            {"model_type": "glm4_moe", "architectures": "Glm4MoeForCausalLM"},
            "0.32.0",
            "Glm4MoeMTPModel",
        ),
    ],
)
def test_drafter_by_release(config: dict[str, str], release: str, architecture: str | None) -> None:
    found = drafter(config["model_type"], config.get("architectures", ""), release)
    assert found == architecture
