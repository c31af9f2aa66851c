"""Proven combinations only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtppp.cluster import Cluster
from mtppp.errors import Refused
from mtppp.plan.admission import Admission, consider, refuse
from mtppp.plan.build import engine_spec

GLM = "glm_moe_dsa"
UNPROVEN = "mimo"
"""A family that nobody has shown anything of."""


@pytest.fixture
def decide(make_cluster: Callable[..., Cluster]) -> Callable[..., Admission]:
    """What is decided for a family on a cluster that differs from the usual one by `changes`."""

    def decide(family: str, **changes: Any) -> Admission:
        cluster = make_cluster(**changes)
        admission = consider(engine_spec(cluster, family=family))
        refuse(f"{family} on vLLM {cluster.runtime.vllm}", admission.refusals)
        return admission

    return decide


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_what_is_proven_goes_ahead(decide: Callable[..., Admission], family: str) -> None:
    assert decide(family).evidence == "evidence decode: engine"


@pytest.mark.parametrize(
    ("release", "shown"),
    [
        (
            "0.29.0",
            "decode: engine, drafter_weights: class, stage_boundary: class, index_share: class",
        ),
        ("0.31.0", "decode: engine of deepseek_v3, stage_boundary: class, index_share: class"),
        ("0.32.0", "decode: engine, stage_boundary: engine, index_share: engine"),
    ],
)
def test_glm_5_2_goes_ahead_on_what_was_shown_of_it(
    decide: Callable[..., Admission], release: str, shown: str
) -> None:
    admission = decide(
        GLM,
        runtime={"vllm": release, "python": "/opt/vllm/bin/python"},
        parallel={"tensor": 2, "pipeline": 2},
        nodes=[{"host": h, "address": f"10.0.0.{i}", "gpus": 2} for i, h in enumerate("ab", 1)],
    )
    assert admission.evidence == f"evidence {shown}"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"enable-eplb": True}, "eplb_pipeline"),
        ({"enable-expert-parallel": True, "data-parallel-size": 2}, "expert_data_parallel"),
        (
            {"enable-expert-parallel": True, "prefill-context-parallel-size": 2},
            "expert_data_parallel",
        ),
        ({"decode-context-parallel-size": 2}, "unproven_parallelism"),
        ({"model-impl": "transformers"}, "other_classes"),
        ({"hf-overrides": {"architectures": ["DeepseekV3ForCausalLM"]}}, "other_classes"),
        ({"hf-overrides": '{"model_type": "deepseek_v3"}'}, "other_classes"),
        (
            {"model-class-overrides": {"GlmMoeDsaForCausalLM": "vllm.models.deepseek_v32:X"}},
            "other_classes",
        ),
    ],
)
def test_flags_that_make_glm_5_2_wrong_are_refused(
    make_cluster: Callable[..., Cluster], args: dict[str, Any], code: str
) -> None:
    cluster = make_cluster(
        parallel={"tensor": 2, "pipeline": 2},
        nodes=[{"host": h, "address": f"10.0.0.{i}", "gpus": 2} for i, h in enumerate("ab", 1)],
        serve={"args": args},
    )
    refusals = consider(engine_spec(cluster, family=GLM)).refusals
    assert code in [refusal.code for refusal in refusals]
    assert consider(engine_spec(make_cluster(), family=GLM)).refusals == ()


def test_what_is_not_proven_is_refused_with_the_way_out(
    decide: Callable[..., Admission],
) -> None:
    with pytest.raises(Refused) as raised:
        decide(UNPROVEN)
    assert raised.value.exit_status == 4
    assert raised.value.message == (
        "mimo on vLLM 0.32.0: mimo under pipeline parallelism has not been proven on vLLM 0.32.0"
    )
    assert raised.value.details == ()
    assert raised.value.hint == (
        "run it with pipeline: 1, or choose a release on which it is proven (`mtppp patches`);"
        " `at_own_risk: [unlisted_family]` goes ahead all the same"
    )


def test_without_a_pipeline_vllm_is_left_as_it_is(decide: Callable[..., Admission]) -> None:
    one = {"parallel": {"tensor": 2}, "speculative": None}
    assert decide(GLM, **one) == Admission(family=GLM)
    assert Admission().evidence == "as vLLM ships it"


def test_a_risk_that_the_file_spells_out_goes_ahead_and_is_kept(
    decide: Callable[..., Admission],
) -> None:
    admission = decide(UNPROVEN, at_own_risk=["unlisted_family"])
    assert [refusal.code for refusal in admission.overridden] == ["unlisted_family"]
    assert admission.evidence == "not proven"


def test_a_drafter_without_its_embedding_is_refused_by_itself(
    decide: Callable[..., Admission],
) -> None:
    with pytest.raises(Refused) as raised:
        decide("glm4_moe_lite", at_own_risk=["unlisted_family"])
    assert "the MTP drafter of glm4_moe_lite is without the model's embedding" in (
        raised.value.message
    )
    assert raised.value.hint.endswith("`at_own_risk: [drafter_embedding]` goes ahead all the same")
    codes = ["unlisted_family", "drafter_embedding"]
    assert [r.code for r in decide("glm4_moe_lite", at_own_risk=codes).overridden] == codes


def test_another_risk_does_not_do(decide: Callable[..., Admission]) -> None:
    with pytest.raises(Refused):
        decide(UNPROVEN, at_own_risk=["eplb_mtp"])


def test_a_risk_that_need_not_be_taken_is_not_in_the_plan(
    decide: Callable[..., Admission],
) -> None:
    assert decide("glm4_moe", at_own_risk=["unlisted_family"]).overridden == ()


def test_a_release_that_nobody_looked_at_cannot_be_risked(
    decide: Callable[..., Admission],
) -> None:
    runtime = {"vllm": "0.99.0", "python": "/opt/vllm/bin/python"}
    with pytest.raises(Refused) as raised:
        decide("glm4_moe", runtime=runtime, at_own_risk=["unknown_release"])
    message = raised.value.message
    assert message.startswith("glm4_moe on vLLM 0.99.0: mtppp does not know vLLM 0.99.0")
    assert raised.value.hint.startswith("use one of 0.23.0, ")
    assert "at_own_risk" not in raised.value.hint


def test_all_reasons_are_told(decide: Callable[..., Admission]) -> None:
    with pytest.raises(Refused) as raised:
        decide(UNPROVEN, serve={"args": {"enable-eplb": True}})
    assert [detail.partition(" (")[0] for detail in raised.value.details] == [
        "expert load balancing",
        "with expert load balancing",
    ]
    assert raised.value.hint.endswith("remove --enable-eplb")
