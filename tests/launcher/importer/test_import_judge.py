"""What a model makes of a command: cuts, drafts, patches, releases, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from importing import Import

from mtppp.errors import ConfigurationError, Refused
from mtppp.importer.judge import default_release
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.plan.build import engine_spec
from mtppp.runtime.lock import has_lock
from mtppp_patches.support import admissible, support

# The command of the public recipe for two nodes, which cannot start as it is.
REPORTED = (
    "vllm serve zai-org/GLM-5.2-FP8 --tensor-parallel-size 8 --pipeline-parallel-size 2 "
    "--nnodes 2 --node-rank {rank} --master-addr $HEAD_IP --kv-cache-dtype fp8 "
    "--tool-call-parser glm47 --enable-auto-tool-choice --reasoning-parser glm45 "
    """--speculative-config '{{"method":"mtp","num_speculative_tokens":5}}' {more}"""
)
GLM = "vllm serve zai-org/GLM-5.2-FP8 -tp 8 -pp 2 --nnodes 2 --kv-cache-dtype fp8 "
MTP = """--speculative-config '{"method":"mtp","num_speculative_tokens":%d}'"""


def test_the_public_report_end_to_end(imported: Import, glm_5_2: ModelFacts) -> None:
    result = imported(
        REPORTED.format(rank=0, more=""),
        REPORTED.format(rank=1, more="--headless"),
        nodes=("h100-a=10.0.0.1", "h100-b=10.0.0.2"),
        facts=glm_5_2,
        gpu="H100-80GB",
    )
    cluster = result.cluster
    assert (cluster.parallel.tensor, cluster.parallel.pipeline) == (8, 2)
    assert cluster.parallel.layer_partition == "auto"
    assert cluster.speculative is not None
    assert cluster.speculative.tokens == 5
    assert [node.address for node in cluster.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert 600_000 < cluster.serve.args["max-model-len"] < 800_000  # type: ignore[operator]
    assert "vLLM's own cut 39/39 is illegal" in result.message("layers 39/39")
    assert "38/40 or 42/36" in result.message("layers 39/39")
    assert "reads the KV cache 6 times" in result.message("num_speculative_tokens 5")
    assert "patch stage_boundary" in result.said("needs")


def test_launch_is_foretold(imported: Import, glm_5_2: ModelFacts) -> None:
    """Whatever support.json says today, the notes say it too."""
    result = imported(GLM + MTP % 3, facts=glm_5_2, gpu="H100-80GB")
    verdict = admissible(engine_spec(result.cluster, family="glm_moe_dsa"))
    refused = [note.message for note in result.draft.notes if note.kind == "refused"]
    assert len(refused) == len(verdict.refusals)
    for refusal, message in zip(verdict.refusals, refused, strict=True):
        assert refusal.reason in message


@pytest.mark.parametrize("cut", ["39,39", "40,38"])
def test_an_illegal_cut_becomes_auto(imported: Import, glm_5_2: ModelFacts, cut: str) -> None:
    result = imported(f"VLLM_PP_LAYER_PARTITION={cut} {GLM}", facts=glm_5_2)
    assert result.cluster.parallel.layer_partition == "auto"
    assert f"layers {cut.replace(',', '/')}" in result.said("changed")


def test_a_legal_cut_stays(imported: Import, glm_5_2: ModelFacts) -> None:
    result = imported(f"VLLM_PP_LAYER_PARTITION=42,36 {GLM}", facts=glm_5_2)
    assert result.cluster.parallel.layer_partition == (42, 36)


def test_a_cut_of_another_model(imported: Import, glm_5_2: ModelFacts) -> None:
    with pytest.raises(ConfigurationError, match="has 60 layers over 2 stages; the model has 78"):
        imported(f"VLLM_PP_LAYER_PARTITION=30,30 {GLM}", facts=glm_5_2)


@pytest.mark.parametrize(
    ("tokens", "gpu", "warned"),
    [
        (5, "H100-80GB", True),
        (5, None, True),
        (5, "B200", False),
        (3, "H100-80GB", False),
        (1, "H20", False),
    ],
)
def test_drafts_that_cost_on_hopper(
    imported: Import, glm_5_2: ModelFacts, tokens: int, gpu: str | None, warned: bool
) -> None:
    command = f"{GLM} --max-model-len 4096 {MTP % tokens}"
    result = imported(command, facts=glm_5_2, gpu=gpu)
    assert (f"num_speculative_tokens {tokens}" in result.said("warning")) == warned


def test_sizes_that_do_not_divide(imported: Import, glm_5_2: ModelFacts) -> None:
    with pytest.raises(Refused, match="64 attention heads do not divide by tensor 6"):
        imported("vllm serve zai-org/GLM-5.2-FP8 -tp 6", facts=glm_5_2)


def test_sparse_attention_on_older_gpus(imported: Import, glm_5_2: ModelFacts) -> None:
    with pytest.raises(Refused, match=r"these GPUs have 8\.0"):
        imported(GLM, facts=glm_5_2, gpu="A100-80GB")


def test_drafts_of_a_model_without_mtp_layer(imported: Import) -> None:
    facts = read_facts({"model_type": "deepseek_v3", **SMALL, "num_nextn_predict_layers": 0})
    with pytest.raises(Refused, match="no MTP layer"):
        imported("vllm serve org/m " + MTP % 3, facts=facts)


SMALL = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16", "vocab_size": 1280},
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64},
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 256, "first_k_dense_replace": 1},
    **{"max_position_embeddings": 4096},
}


def test_weights_that_do_not_fit(imported: Import, glm_5_2: ModelFacts) -> None:
    with pytest.raises(Refused, match=r"does not fit into 8 x H100-80GB: 704 GiB"):
        imported("vllm serve zai-org/GLM-5.2-FP8 -tp 8", facts=glm_5_2, gpu="H100-80GB")


def test_a_length_that_does_not_fit(imported: Import, glm_5_2: ModelFacts) -> None:
    with pytest.raises(Refused, match="max-model-len 1000000 does not fit") as refused:
        imported(f"{GLM} --max-model-len 1000000", facts=glm_5_2, gpu="H100-80GB")
    largest = int(refused.value.hint.rpartition(" ")[2])
    fits = imported(f"{GLM} --max-model-len {largest}", facts=glm_5_2, gpu="H100-80GB")
    assert fits.cluster.serve.args["max-model-len"] == largest


def test_a_length_nobody_gave(imported: Import, glm_5_2: ModelFacts) -> None:
    unlooked = imported(GLM, facts=glm_5_2)
    assert "max-model-len" in unlooked.said("warning")
    assert "max-model-len" not in unlooked.cluster.serve.args
    roomy = imported(GLM, facts=glm_5_2, gpu="H200")
    assert "max-model-len" not in roomy.cluster.serve.args


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("vllm serve org/m -tp 2", True),
        ("vllm serve org/m -tp 2 -pp 2 --nnodes 2", False),
        ("vllm serve org/m -tp 2 " + MTP % 1, False),
    ],
)
def test_expert_balancing(imported: Import, glm_5_2: ModelFacts, command: str, kept: bool) -> None:
    result = imported(f"{command} --enable-eplb --max-model-len 4096", facts=glm_5_2)
    assert ("enable-eplb" in result.cluster.serve.args) == kept
    assert ("--enable-eplb" in result.said("changed")) != kept


@pytest.fixture
def glm_4_moe() -> ModelFacts:
    return read_facts(
        {
            "model_type": "glm4_moe",
            **SMALL,
            "architectures": ["Glm4MoeForCausalLM"],
            "head_dim": 64,
            "attention_bias": True,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
        }
    )


Proven = Callable[[str], bool]


def test_the_release_of_an_image_gives_way_to_a_proven_one(
    imported: Import, glm_4_moe: ModelFacts
) -> None:
    arguments = f"org/m -tp 2 -pp 2 --nnodes 2 {MTP % 1}"
    image = f"docker run vllm/vllm-openai:v0.23.0 {arguments}"
    changed = imported(image, facts=glm_4_moe)
    assert changed.cluster.runtime.vllm == default_release() != "0.23.0"
    assert "vLLM 0.23.0" in changed.said("changed")
    wished = imported(image, facts=glm_4_moe, vllm="0.23.0")
    assert wished.cluster.runtime.vllm == "0.23.0"
    assert "vLLM 0.23.0" in wished.said("refused")


def test_where_nobody_names_a_release_mtppp_can_install_it() -> None:
    assert has_lock(default_release(), "cuda")
    assert default_release() in support().releases
