"""The ready clusters: each loads, and is planned where its model is known here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtppp.cluster import Cluster, load
from mtppp.hosts.facts import GpuFacts, HostFacts
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.plan.defaults import choose_defaults
from mtppp.plan.review import Review, review

CONFIGS = Path(__file__).parents[3] / "cluster_configs"
FILES = sorted(CONFIGS.glob("*.yaml"))

# As published, cut down to what says the model's size.
GLM_4_5_AIR = {
    **{"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "dtype": "bfloat16"},
    **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944},
    **{"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8},
    **{"head_dim": 128, "attention_bias": True, "use_qk_norm": False},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    **{"num_nextn_predict_layers": 1, "max_position_embeddings": 131072},
    **{"tie_word_embeddings": False},
}


def reviewed(name: str, model: ModelFacts) -> Review:
    """A ready cluster, planned without asking a host."""
    cluster = load(CONFIGS / name).cluster
    return review(cluster, model=model, bundle="b", facts=assumed(cluster))


def assumed(cluster: Cluster) -> list[HostFacts]:
    return [
        HostFacts.assumed(
            node.address,
            python="/p",
            vllm="0.32.0",
            gpus=[GpuFacts.of_type(node.gpu_type)] * node.gpus if node.gpu_type else (),
        )
        for node in cluster.nodes
    ]


def tokens(found: Review) -> int:
    """Tokens that the KV cache has room for."""
    assert found.memory is not None
    assert found.memory.fits
    assert found.memory.tokens is not None
    return found.memory.tokens


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_file_loads(file: Path) -> None:
    assert load(file).cluster.name


def test_there_is_one_for_each_need() -> None:
    assert {file.stem for file in FILES} >= {
        "glm-4.5-air-2x4-h100",
        "glm-5.2-fp8-2x8-h100",
        "glm-5.2-fp8-2x8-h100-tp16",
        "glm-5.2-fp8-2x8-h200",
        "local-demo",
    }


@pytest.fixture(scope="module")
def glm_5_2() -> ModelFacts:
    return read_facts(find_config("zai-org/GLM-5.2-FP8").values)


def test_glm_5_2_on_h100(glm_5_2: ModelFacts) -> None:
    found = reviewed("glm-5.2-fp8-2x8-h100.yaml", glm_5_2)
    plan = found.plan
    assert plan.layer_partition in {(42, 36), (38, 40)}
    assert plan.draft_tokens == 3
    assert [stage.nodes for stage in plan.stages] == [(0,), (1,)]
    assert tokens(found) >= 131072


def test_its_baseline(glm_5_2: ModelFacts) -> None:
    found = reviewed("glm-5.2-fp8-2x8-h100-tp16.yaml", glm_5_2)
    plan = found.plan
    assert (plan.tensor, plan.pipeline, plan.draft_tokens) == (16, 1, 0)
    assert len(plan.ranks) == 16
    assert tokens(found) >= 131072


def test_the_baseline_differs_in_nothing_that_changes_numbers() -> None:
    one = load(CONFIGS / "glm-5.2-fp8-2x8-h100.yaml").cluster
    other = load(CONFIGS / "glm-5.2-fp8-2x8-h100-tp16.yaml").cluster
    assert one.serve == other.serve
    assert one.model == other.model
    assert one.runtime == other.runtime
    assert one.nodes == other.nodes


def test_glm_5_2_on_h200(glm_5_2: ModelFacts) -> None:
    found = reviewed("glm-5.2-fp8-2x8-h200.yaml", glm_5_2)
    plan = found.plan
    assert plan.layer_partition in {(42, 36), (38, 40)}
    assert tokens(found) >= 1_048_576


def test_glm_4_5_air() -> None:
    found = reviewed("glm-4.5-air-2x4-h100.yaml", read_facts(GLM_4_5_AIR))
    assert sum(found.plan.layer_partition) == 46
    assert tokens(found) >= 131072


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_nothing_speaks_against_a_ready_file(file: Path) -> None:
    known = {"zai-org/GLM-4.5-Air": GLM_4_5_AIR}
    model = load(file).cluster.model.id
    values = known[model] if model in known else find_config(model).values
    assert reviewed(file.name, read_facts(values)).refusals == ()


@pytest.mark.parametrize("name", ["glm-5.2-fp8-2x8-h100.yaml", "glm-5.2-fp8-2x8-h200.yaml"])
def test_no_warning_about_the_ready_files(name: str, glm_5_2: ModelFacts) -> None:
    cluster = load(CONFIGS / name).cluster
    assert choose_defaults(cluster, glm_5_2, assumed(cluster)).warnings == ()
    assert reviewed(name, glm_5_2).warnings == ()
