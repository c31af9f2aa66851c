from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtppp.cli.plan_page import page
from mtppp.cli.plan_view import view
from mtppp.errors import ConfigurationError, Refused
from mtppp.model.facts import read_facts
from mtppp.plan.admission import refuse
from mtppp.plan.report import report

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clusters import GLM, assumed, cluster, codes, reviewed

LAYERS_92 = read_facts(
    {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 151552,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 131072,
    }
)


def serve(**args: Any) -> dict[str, Any]:
    return {"args": {"kv-cache-dtype": "fp8", **args}}


def test_the_public_shape_is_cut_where_the_model_allows_it_and_fits() -> None:
    result = reviewed()
    assert result.plan.layer_partition == (42, 36)
    assert codes(result) == set()
    assert any("39/39 is illegal" in line for line in result.cut.why)
    assert result.memory is not None
    # 45.2 and 43.1 GiB without what every rank holds whole and buffers.
    assert [round(stage.weights / 2**30) for stage in result.memory.stages] == [47, 45]
    assert result.memory.tokens == 724_287
    assert result.fullest == 0
    assert [stage.cache_per_token for stage in result.memory.stages] == [29136, 25592]


def test_an_illegal_cut_is_shown_and_refused() -> None:
    result = reviewed(parallel={"tensor": 8, "pipeline": 2, "layer_partition": [39, 39]})
    assert result.plan.layer_partition == (39, 39)
    assert codes(result) == {"illegal-cut"}
    refusal = next(r for r in result.refusals if r.code == "illegal-cut")
    assert refusal.way_out == "use 38/40 or 42/36, or auto"
    assert not refusal.overridable


def test_a_cut_that_is_none_of_the_model_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="has 77 layers over 2 stages; the model has 78"):
        reviewed(parallel={"tensor": 8, "pipeline": 2, "layer_partition": [41, 36]})


@pytest.mark.parametrize("partition", ["auto", [42, 36]])
def test_the_largest_max_model_len_that_a_refusal_names_fits_and_one_more_does_not(
    partition: Any,
) -> None:
    parallel = {"tensor": 8, "pipeline": 2, "layer_partition": partition}
    refused = reviewed(parallel=parallel, serve=serve(**{"max-model-len": 1_000_000}))
    assert codes(refused) == {"memory"}
    words = next(r.way_out for r in refused.refusals if r.code == "memory").split()
    largest = next(int(word) for word in words if word.isdigit())
    assert codes(reviewed(parallel=parallel, serve=serve(**{"max-model-len": largest}))) == set()
    more = reviewed(parallel=parallel, serve=serve(**{"max-model-len": largest + 1}))
    assert codes(more) == {"memory"}


def test_without_max_model_len_the_models_own_must_fit() -> None:
    result = reviewed(serve=serve())
    assert codes(result) == {"memory"}
    assert any("max-model-len is not set" in warning.message for warning in result.warnings)


def test_memory_can_be_overridden_and_that_stays_in_sight() -> None:
    result = reviewed(serve=serve(), at_own_risk=["memory"])
    assert codes(result) == set()
    assert "memory" in result.plan.at_own_risk
    assert any("at your own risk (memory)" in warning.message for warning in result.warnings)


def test_invariants_that_data_parallelism_leaves_out_are_missed_aloud() -> None:
    def missed(**changes: Any) -> list[str]:
        return [w.message for w in reviewed(**changes).warnings if "invariants" in w.message]

    engines = serve(**{"data-parallel-size": 2})
    assert missed() == []
    assert len(missed(serve=engines)) == 1
    assert missed(serve=engines, invariants={"sample_every": 0}) == []


def test_sizes_that_do_not_divide_are_refused_in_the_models_words() -> None:
    result = reviewed(parallel={"tensor": 6, "pipeline": 2})
    assert codes(result) == {"heads", "vocabulary", "width"}
    heads = next(r for r in result.refusals if r.code == "heads")
    assert heads.reason == "64 attention heads do not divide by tensor 6"
    # Stages do not span the nodes of eight.
    assert heads.way_out == "parallel.tensor can be 1, 2, 4, 8"
    assert len([w for w in result.warnings if "would be idle" in w.message]) == 2


def test_sparse_attention_is_refused_on_gpus_before_hopper() -> None:
    result = reviewed(gpu_type="A100-80GB")
    assert codes(result) == {"sparse-attention-gpu"}
    assert "a, b: the model attends sparsely" in result.refusals[-1].reason


def test_what_does_not_fit_at_all_is_drawn_and_refused() -> None:
    result = reviewed(gpu_type="A100-40GB")
    assert "memory" in codes(result)
    assert result.memory is not None
    assert not result.memory.fits
    assert "more than the GPU" in page(result)


def test_more_stages_than_a_model_has_places_for_is_refused_without_a_plan() -> None:
    nodes = [{"host": f"n{i}", "address": f"10.0.0.{i}"} for i in range(1, 4)]
    with pytest.raises(Refused) as refused:
        reviewed(nodes=nodes, parallel={"tensor": 1, "pipeline": 24})
    told = [refused.value.message, *refused.value.details]
    assert any("24 pipeline stages, but a stage may begin at only 21" in line for line in told)


def test_unknown_gpus_are_said_to_be_unknown_and_no_number_hangs_on_them() -> None:
    result = reviewed(gpu_type=None, serve=serve())
    assert codes(result) == set()
    assert any(line.startswith("the GPUs:") for line in result.unknowns)
    data = report(result)
    assert data["memory"]["tokens"] is None
    assert {stage["free_bytes"] for stage in data["memory"]["stages"]} == {None}
    assert data["memory"]["stages"][0]["resident_bytes"] > 0
    assert not any("room for" in line for line in data["partition"]["why"])


def test_a_family_that_is_not_known_is_planned_with_a_cut_from_the_file() -> None:
    unknown = replace(GLM, model_type="new", stack=None, unknowns=("the family",))
    result = reviewed(unknown, parallel={"tensor": 8, "pipeline": 2, "layer_partition": [42, 36]})
    assert result.memory is None
    assert "the family" in result.unknowns
    assert "what each layer costs is not known" in result.cut.why[1]
    assert page(result)
    assert list(view(result, (), width=80, ascii_only=True))


def test_refuse_names_every_reason_and_how_to_go_ahead_only_where_one_can() -> None:
    memory = reviewed(serve=serve()).refusals
    with pytest.raises(Refused) as overridable:
        refuse("glm", memory)
    assert "goes ahead all the same" in overridable.value.hint
    with pytest.raises(Refused) as firm:
        refuse("glm", reviewed(parallel={"tensor": 6, "pipeline": 2}).refusals)
    assert "goes ahead" not in firm.value.hint
    refuse("glm", ())


def test_the_report_is_json_and_the_same_each_time() -> None:
    texts = {json.dumps(report(reviewed()), sort_keys=True, allow_nan=False) for _ in range(2)}
    assert len(texts) == 1


def test_64_nodes_are_planned_drawn_and_told_in_under_a_second() -> None:
    nodes = [{"host": f"n{i}", "address": f"10.0.{i}.1"} for i in range(64)]
    started = time.process_time()
    described = cluster(nodes=nodes, parallel={"tensor": 8, "pipeline": 64}, serve={})
    result = reviewed(
        LAYERS_92, nodes=nodes, parallel={"tensor": 8, "pipeline": 64}, serve={}, speculative=None
    )
    assert len(page(result)) > 100_000
    assert len(list(view(result, (), width=120, ascii_only=False))) > 350
    assert time.process_time() - started < 1
    assert len(assumed(described)) == 64
    assert len(result.plan.nodes) == 64
    assert codes(result) == set()


@pytest.mark.parametrize(
    ("given", "length"), [(4096, 4096), ("128K", 131072), ("1.5k", 1500), ("1m", 1_000_000)]
)
def test_max_model_len_is_read_as_vllm_reads_it(given: Any, length: int) -> None:
    assert reviewed(serve=serve(**{"max-model-len": given})).serving.max_model_len == length


@pytest.mark.parametrize("given", [-1, "auto"])
def test_a_length_that_the_engine_chooses_is_not_refused(given: Any) -> None:
    result = reviewed(serve=serve(**{"max-model-len": given}))
    assert codes(result) == set()
    assert result.serving.max_model_len is None
    assert page(result)


@pytest.mark.parametrize("given", ["lots", 0, True, 1.5])
def test_a_length_that_is_none_is_an_error(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a number of tokens"):
        reviewed(serve=serve(**{"max-model-len": given}))
