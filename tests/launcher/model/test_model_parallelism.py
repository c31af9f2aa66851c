from __future__ import annotations

import pytest
from published import GLM_4_5_AIR, GLM_4_7_FLASH, MIMO_V2_FLASH, QWEN3_NEXT

from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.model.parallelism import draft_problems, gpu_problems, parallel_problems

GLM = read_facts(find_config("zai-org/GLM-5.2-FP8", environ={}).values)


def messages(facts: ModelFacts, **sizes: int) -> str:
    return "\n".join(problem.message for problem in parallel_problems(facts, **sizes))


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
def test_glm_5_2_divides(tensor: int) -> None:
    assert parallel_problems(GLM, tensor=tensor, pipeline=2) == ()


def test_a_cut_inside_a_quantisation_block() -> None:
    said = messages(GLM, tensor=32)
    assert "mlp.experts: 2048 channels over tensor 32 are 64 each" in said
    assert "fp8 block of 128" in said


def test_whole_experts_are_not_cut_but_the_shared_one_is() -> None:
    said = messages(GLM, tensor=32, expert=32)
    assert "mlp.experts" not in said
    assert "mlp.shared_experts" in said


def test_heads_vocabulary_and_width() -> None:
    said = messages(GLM, tensor=6)
    assert "64 attention heads do not divide by tensor 6" in said
    assert "a vocabulary of 154880" in said
    assert "mlp.experts: a width of 2048 does not divide by tensor 6" in said


def test_experts_over_ranks() -> None:
    assert "256 experts do not divide by 24 expert ranks" in messages(GLM, tensor=8, expert=24)


def test_more_stages_than_layers_that_may_begin_one() -> None:
    assert messages(GLM, tensor=8, pipeline=21) == ""
    assert "only 21 of the 78 layers" in messages(GLM, tensor=8, pipeline=22)


def test_key_value_heads_may_be_repeated_but_not_torn() -> None:
    facts = read_facts(GLM_4_5_AIR)
    assert messages(facts, tensor=16) == ""
    assert "8 key/value heads" in messages(facts, tensor=12)


def test_latent_attention_has_no_key_value_heads_to_spread() -> None:
    said = messages(read_facts(GLM_4_7_FLASH), tensor=8)
    assert "20 attention heads do not divide by tensor 8" in said
    assert "key/value" not in said


def test_heads_of_linear_and_sliding_layers() -> None:
    assert "linear attention's 16 heads" in messages(read_facts(QWEN3_NEXT), tensor=32)
    assert "key/value heads of the sliding layers" in messages(read_facts(MIMO_V2_FLASH), tensor=12)


def test_sparse_attention_wants_hopper() -> None:
    assert gpu_problems(GLM, (9, 0)) == ()
    assert gpu_problems(GLM, (10, 0)) == ()
    (problem,) = gpu_problems(GLM, (8, 9))
    assert "8.9" in problem.message
    assert gpu_problems(read_facts(GLM_4_5_AIR), (8, 0)) == ()


def test_drafts() -> None:
    assert draft_problems(GLM, 3) == ()
    assert draft_problems(GLM, 0) == ()
    (problem,) = draft_problems(read_facts(GLM_4_5_AIR | {"num_nextn_predict_layers": 0}), 1)
    assert problem.code == "no-mtp-layer"
    two = read_facts(GLM_4_5_AIR | {"num_nextn_predict_layers": 2})
    assert draft_problems(two, 1) == ()
    assert draft_problems(two, 4) == ()
    assert [problem.code for problem in draft_problems(two, 3)] == ["drafts-not-a-multiple"]
