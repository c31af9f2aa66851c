"""Each way in which ranks can differ from the Plan is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import patches_in_place

from mtppp.phases import attest
from mtppp.plan.plan import Plan
from mtppp_patches import drafter_weights
from mtppp_patches.attest import digest, hashed


def differences(plan: Plan, records: Sequence[Mapping[str, Any]], **secrets: str) -> Iterator[str]:
    return attest.differences(plan, records, secrets)


@pytest.fixture
def plan(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan(parallel={"pipeline": 2, "layer_partition": [4, 2]})


def records_of(plan: Plan) -> list[dict[str, Any]]:
    """What the ranks attest when all is as planned, as the plugin writes it."""
    return [
        {
            "schema": 1,
            "rank": rank.rank,
            "node": rank.node,
            "stage": rank.stage,
            "tensor_rank": rank.tensor_rank,
            "address": plan.nodes[rank.node].address,
            "layers": list(
                range(plan.stages[rank.stage].first_layer, plan.stages[rank.stage].last_layer + 1)
            ),
            "drafter": "Glm4MoeMTP" if plan.stages[rank.stage].drafter else None,
            "runner": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
            "runner_v2": True,
            "executor": "ray",
            "async_scheduling": True,
            "invariants": "count",
            "vllm": f"{plan.vllm}+cpu",
            "plugins": "0123456789abcdef",
            "patches": patches_in_place(plan),
            "displaced": [],
            "environment": hashed(plan.nodes[rank.node].ray.env),
        }
        for rank in plan.ranks
    ]


def test_ranks_that_are_as_planned(plan: Plan) -> None:
    assert list(differences(plan, records_of(plan))) == []
    assert list(differences(plan, records_of(plan)[::-1])) == []


@pytest.mark.parametrize(
    ("rank", "changes", "told"),
    [
        (0, {"node": 1}, "rank 0 on b: host is b, planned is a"),
        (0, {"address": "10.0.0.2"}, "rank 0 on a: address is 10.0.0.2, planned is 10.0.0.1"),
        (1, {"stage": 0}, "rank 1 on b: stage is 0, planned is 1"),
        (1, {"tensor_rank": 1}, "rank 1 on b: tensor_rank is 1, planned is 0"),
        (0, {"layers": [0, 1, 2, 4]}, "rank 0 on a: layers is 0-2,4, planned is 0-3"),
        (1, {"layers": []}, "rank 1 on b: layers is [], planned is 4-5"),
        (1, {"layers": None}, "rank 1 on b: layers is None, planned is 4-5"),
        (0, {"drafter": "MTP"}, "rank 0 on a: drafter is MTP, planned is none"),
        (1, {"drafter": None}, "rank 1 on b: drafter is none, planned is one"),
        (0, {"async_scheduling": False}, "rank 0 on a: async_scheduling is False, planned is True"),
        (1, {"invariants": "off"}, "rank 1 on b: invariants is off, planned is count"),
        (0, {"executor": "mp"}, "rank 0 on a: executor is mp, planned is ray"),
        (1, {"plugins": "ffff"}, "rank 1 on b: plugins is ffff, planned is 0123456789abcdef"),
        (0, {"vllm": "0.31.0"}, "rank 0 on a: release is 0.31.0, planned is 0.32.0"),
        (0, {"displaced": ["a.b"]}, "rank 0 on a: displaced is ['a.b'], planned is []"),
        (
            0,
            {"runner_v2": False, "runner": "vllm.v1.worker.gpu_model_runner.Runner"},
            "rank 0 on a: runs vllm.v1.worker.gpu_model_runner.Runner, not the V2 model runner",
        ),
        (
            1,
            {"patches": {"placement": {}}},
            "rank 1 on b: patches are placement, planned are {patches}",
        ),
        (
            1,
            {"patches": {}},
            "rank 1 on b: patches are none, planned are {patches}",
        ),
    ],
)
def test_each_difference_is_told(plan: Plan, rank: int, changes: dict[str, Any], told: str) -> None:
    records = records_of(plan)
    records[rank].update(changes)
    patches = ", ".join(sorted(plan.patches))
    assert list(differences(plan, records)) == [told.format(patches=patches)]


def test_a_patch_that_a_rank_names_and_has_not_put_in_place_is_told(plan: Plan) -> None:
    records = records_of(plan)
    guard = records[1]["patches"]["engine_guard"]
    guard["pending"], guard["targets"] = guard["targets"], []
    records[0]["patches"]["index_share"] = None
    what = "WorkerWrapperBase.init_device"
    assert list(differences(plan, records)) == [
        f"rank 0 on a: of patch index_share is not in place: vllm.v1.worker.worker_base:{what}",
        f"rank 1 on b: of patch engine_guard is not in place: vllm.v1.worker.worker_base:{what}",
    ]


def test_drafts_must_be_relayed_by_each_rank(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(runtime={"vllm": "0.29.0", "python": "/opt/vllm/bin/python"})
    records = records_of(plan)
    assert list(differences(plan, records)) == []
    receive = "vllm.v1.worker.gpu.pp_utils:PPHandler.receive"
    records[0]["patches"]["draft_relay"]["targets"].remove(receive)
    assert list(differences(plan, records)) == [
        f"rank 0 on a: of patch draft_relay is not in place: {receive}"
    ]


def test_the_drafter_of_the_last_stage_must_have_its_embedding(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan(runtime={"vllm": "0.29.0", "python": "/opt/vllm/bin/python"})
    plan = replace(plan, patches=(*plan.patches, drafter_weights.PATCH.name))
    records = records_of(plan)
    for record in records:
        record["patches"][drafter_weights.PATCH.name] = {"targets": [], "pending": []}
    [told] = differences(plan, records)
    assert told.startswith("rank 1 on b: of patch drafter_weights is not in place: none of vllm.")


@pytest.mark.parametrize(
    "key",
    [
        "address",
        "stage",
        "tensor_rank",
        "layers",
        "async_scheduling",
        "invariants",
        "executor",
        "plugins",
        "vllm",
        "displaced",
        "runner_v2",
        "patches",
        "environment",
    ],
)
def test_what_a_rank_does_not_say_is_a_difference(plan: Plan, key: str) -> None:
    records = records_of(plan)
    del records[0][key]
    [told] = differences(plan, records)
    assert told.startswith("rank 0 on a: ")


def test_all_differences_of_all_ranks_are_told(plan: Plan) -> None:
    records = records_of(plan)
    records[0]["executor"] = "mp"
    records[1].update(drafter=None, layers=[5])
    assert list(differences(plan, records)) == [
        "rank 0 on a: executor is mp, planned is ray",
        "rank 1 on b: layers is 5, planned is 4-5",
        "rank 1 on b: drafter is none, planned is one",
    ]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NCCL_IB_HCA", "=mlx5_1", "has another value, planned is =mlx5_0"),
        ("NCCL_IB_HCA", None, "is not set, planned is =mlx5_0"),
        ("GLOO_SOCKET_IFNAME", "lo", "has another value, planned is eth0"),
        ("HF_TOKEN", "hf_of_a_colleague", "has another value, planned is the value that you have"),
        ("HF_TOKEN", None, "is not set, planned is the value that you have"),
    ],
)
def test_a_variable_that_a_rank_has_otherwise(
    make_plan: Callable[..., Plan], name: str, value: str | None, told: str
) -> None:
    runtime = {"vllm": "0.32.0", "python": "/p", "env": {"NCCL_IB_HCA": "=mlx5_0"}}
    plan = make_plan(runtime=runtime)
    records = records_of(plan)
    for record in records:
        record["environment"]["HF_TOKEN"] = digest("hf_mine")
    assert list(differences(plan, records, HF_TOKEN="hf_mine")) == []
    held = records[1]["environment"]
    held.pop(name) if value is None else held.update({name: digest(value)})
    assert list(differences(plan, records, HF_TOKEN="hf_mine")) == [
        f"rank 1 on b: variable {name} {told}"
    ]


def test_a_rank_has_the_environment_of_its_own_node(plan: Plan) -> None:
    records = records_of(plan)
    records[1]["environment"] = records[0]["environment"]
    told = list(differences(plan, records))
    assert "rank 1 on b: variable VLLM_HOST_IP has another value, planned is 10.0.0.2" in told
    assert all(line.startswith("rank 1 on b: variable ") for line in told)


def test_of_a_long_value_the_beginning_is_told(plan: Plan) -> None:
    records = records_of(plan)
    records[0]["environment"]["MTPPP_ENGINE"] = digest("{}")
    [told] = differences(plan, records)
    assert told.endswith("...")
    assert len(told) < 140


def test_what_vllm_gives_a_rank_of_its_own_is_no_difference(
    make_plan: Callable[..., Plan],
) -> None:
    env = {
        "TORCHINDUCTOR_COMPILE_THREADS": "8",
        "NCCL_IB_HCA": "mlx5_0",
        "VLLM_GPU_NIC_PCIE_MAPPING": "0000:03:00.0=0000:05:00.0",
        "VLLM_NIC_SELECTION_VARS": "UCX_NET_DEVICES:1, NCCL_IB_HCA",
    }
    plan = make_plan(runtime={"vllm": "0.32.0", "python": "/p", "env": env})
    records = records_of(plan)
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "NCCL_IB_HCA"):
        records[0]["environment"][name] = digest("its own")
    assert list(differences(plan, records)) == []


def test_ranks_that_are_missing_too_many_or_twice(plan: Plan) -> None:
    first, second = records_of(plan)
    assert list(differences(plan, [])) == [
        "rank 0 on a: nothing attested",
        "rank 1 on b: nothing attested",
    ]
    assert list(differences(plan, [first, second, second | {"rank": 2}])) == [
        "rank 2 on b: attested, but not in the Plan"
    ]
    assert list(differences(plan, [first, second | {"node": 0}, second])) == [
        "rank 1 on a, b: attested on each"
    ]


def test_ranks_of_one_host_that_differ_alike_are_told_in_one_line(
    make_plan: Callable[..., Plan],
) -> None:
    nodes = [{"host": host, "address": f"10.0.0.{i}", "gpus": 4} for i, host in enumerate("ab", 1)]
    plan = make_plan(nodes=nodes, parallel={"tensor": 4, "pipeline": 2})
    records = records_of(plan)
    for rank in (0, 2, 3, 4, 5):
        records[rank]["plugins"] = "ffff"
    del records[6:]
    what = "plugins is ffff, planned is 0123456789abcdef"
    assert list(differences(plan, records)) == [
        f"ranks 0,2-3 on a: {what}",
        f"ranks 4-5 on b: {what}",
        "ranks 6-7 on b: nothing attested",
    ]


def test_the_drafter_is_expected_nowhere_without_speculation(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan(speculative=None)
    records = records_of(plan)
    assert list(differences(plan, records)) == []
    records[1]["drafter"] = "MTP"
    assert list(differences(plan, records)) == ["rank 1 on b: drafter is MTP, planned is none"]
