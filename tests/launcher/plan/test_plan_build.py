"""The Plan as a whole: what goes in, what comes out, and that it is a value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError, Refused
from mtppp.hosts.facts import HostFacts
from mtppp.model.config import find_config
from mtppp.model.facts import read_facts
from mtppp.plan.build import engine_spec, serving
from mtppp.plan.plan import NodePlan, Plan, Rank, Stage
from mtppp.plan.ports import ray_ports
from mtppp.plan.review import review
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

PATCHES_NEEDED = names_needed(
    PATCHES,
    EngineSpec(
        release="0.32.0",
        model_type="glm4_moe",
        pipeline=2,
        layer_partition=(4, 2),
        speculative=Speculative("mtp", 3),
        placement={"addresses": []},
        invariants="count",
    ),
)
ENGINE = (
    '{"async_scheduling":true,"at_own_risk":[],"data_parallel":1,"decode_context":1,'
    '"device":"cuda","eplb":false,"expert_parallel":false,"invariants":"count",'
    '"layer_partition":[4,2],"model_type":"glm4_moe","other_classes":false,"patches":'
    + json.dumps(PATCHES_NEEDED, separators=(",", ":"))
    + ',"pipeline":2,"placement":{"addresses":'
    '["10.0.0.1","10.0.0.2"],"group":"demo","namespace":"mtppp"},"prefill_context":1,'
    '"release":"0.32.0","runner":"v2","sample_every":7,"schema":1,'
    '"speculative":{"method":"mtp","tokens":3},"tensor":1}'
)
CUT = {"parallel": {"pipeline": 2, "layer_partition": [4, 2]}}


def test_the_parts_of_a_plan(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(**CUT)
    assert (plan.name, plan.model, plan.served_name) == ("demo", "/models/demo", "demo")
    assert (plan.family, plan.vllm, plan.device) == ("glm4_moe", "0.32.0", "cuda")
    assert (plan.tensor, plan.pipeline, plan.draft_tokens) == (1, 2, 3)
    assert plan.layer_partition == (4, 2)
    assert plan.stages == (
        Stage(index=0, nodes=(0,), first_layer=0, last_layer=3, drafter=False),
        Stage(index=1, nodes=(1,), first_layer=4, last_layer=5, drafter=True),
    )
    assert plan.ranks == (Rank(0, 0, 0, 0), Rank(1, 1, 0, 1))
    assert plan.patches == PATCHES_NEEDED
    assert plan.evidence == "evidence decode: engine"
    assert plan.endpoint == "http://10.0.0.1:8000"
    assert plan.head is plan.nodes[0]


def test_a_node_of_a_plan(make_plan: Callable[..., Plan]) -> None:
    first, second = make_plan(**CUT).nodes
    assert second == NodePlan(
        index=1,
        host="b",
        address="10.0.0.2",
        directory="/var/tmp/mtppp-1000/demo/1",
        ray_directory=second.ray_directory,
        plugins="/var/tmp/mtppp-1000/plugins/0123456789abcdef",
        ports=ray_ports(26300),
        ray=second.ray,
    )
    assert (second.ray.role, second.ray.log) == ("ray", "ray.log")
    assert second.ray.argv[4:6] == ("--address=10.0.0.1:26300", "--node-ip-address=10.0.0.2")
    assert second.ray.env["MTPPP_ENGINE"] == first.ray.env["MTPPP_ENGINE"] == ENGINE
    assert second.ray.env["VLLM_HOST_IP"] == "10.0.0.2"
    assert second.ray.env["VLLM_PP_LAYER_PARTITION"] == "4,2"
    assert f"--temp-dir={second.ray_directory}" in second.ray.argv
    assert first.ray_directory != second.ray_directory


def test_commands_on_the_first_node(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(**CUT)
    on_head = {**plan.nodes[0].ray.env, "RAY_ADDRESS": "10.0.0.1:26300"}
    assert (plan.placement.role, plan.placement.log) == ("placement", "placement.log")
    assert (plan.server.role, plan.server.log) == ("server", "server.log")
    assert plan.placement.env == plan.server.env == on_head
    assert plan.placement.argv[-2:] == ("mtppp_patches.placement", "--timeout=600")
    assert plan.server.argv == (
        "/opt/vllm/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "/models/demo",
        "--served-model-name",
        "demo",
        "--host",
        "10.0.0.1",
        "--port",
        "8000",
        "--tensor-parallel-size",
        "1",
        "--pipeline-parallel-size",
        "2",
        "--distributed-executor-backend",
        "ray",
        "--async-scheduling",
        "--speculative-config",
        '{"method": "mtp", "num_speculative_tokens": 3}',
        "--gpu-memory-utilization=0.9",
        "--max-num-batched-tokens=8192",
        "--max-num-seqs=128",
        "--enable-prefix-caching",
        "--middleware=mtppp_patches.gate.Gate",
    )
    ungated = make_plan(**CUT, verify={"enabled": False})
    assert ungated.server.argv == plan.server.argv[:-1]
    assert (plan.gate, ungated.gate) == (True, False)


def test_the_same_input_gives_the_same_bytes(make_plan: Callable[..., Plan]) -> None:
    plan, again = make_plan(**CUT), make_plan(**CUT)
    assert plan == again
    assert plan.to_json() == again.to_json()
    text = plan.to_json()
    assert json.dumps(json.loads(text), indent=2, sort_keys=True) == text
    assert make_plan(**CUT, serve={"port": 8001}).to_json() != text


def test_a_secret_is_a_name(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    plan = make_plan(secrets=["HF_TOKEN"])
    assert plan.secrets == ("HF_TOKEN",)
    assert "hf_secret_value" not in plan.to_json()
    commands = [plan.placement, plan.server, *(node.ray for node in plan.nodes)]
    assert all("HF_TOKEN" not in command.env for command in commands)


def test_addresses_of_ipv6_are_bracketed_where_a_port_follows(
    make_plan: Callable[..., Plan],
) -> None:
    nodes = [{"host": "a", "address": "fd00::1", "gpus": 1}]
    plan = make_plan(nodes=[*nodes, {"host": "b", "address": "fd00::2", "gpus": 1}])
    assert plan.endpoint == "http://[fd00::1]:8000"
    assert plan.server.env["RAY_ADDRESS"] == "[fd00::1]:26300"
    assert "--address=[fd00::1]:26300" in plan.nodes[1].ray.argv
    assert "--node-ip-address=fd00::2" in plan.nodes[1].ray.argv


def test_tensor_parallelism_alone_has_one_stage_and_no_partition(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan(parallel={"tensor": 2}, speculative=None)
    assert plan.layer_partition == (6,)
    assert plan.stages == (
        Stage(index=0, nodes=(0, 1), first_layer=0, last_layer=5, drafter=False),
    )
    assert "VLLM_PP_LAYER_PARTITION" not in plan.server.env
    assert "--speculative-config" not in plan.server.argv


def test_a_model_in_the_home_directory_is_named_by_its_whole_path(
    make_plan: Callable[..., Plan], make_facts: Callable[..., HostFacts]
) -> None:
    facts = [make_facts(model_path="/home/ubuntu/models/demo")] * 2
    plan = make_plan(*facts, model={"id": "~/models/demo"})
    assert plan.server.argv[4] == "/home/ubuntu/models/demo"


def test_a_model_of_the_hub_keeps_its_name(
    make_plan: Callable[..., Plan], make_facts: Callable[..., HostFacts]
) -> None:
    facts = [make_facts(model_path=None)] * 2
    plan = make_plan(*facts, model={"id": "org/model", "revision": "main"})
    assert plan.server.argv[4:7] == ("org/model", "--revision", "main")


def test_risks_taken_are_in_the_plan(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> None:
    glm = read_facts(find_config("zai-org/GLM-5.2-FP8", environ={}).values)
    runtime = {"vllm": "0.23.0", "python": "/opt/vllm/bin/python"}
    cluster = make_cluster(runtime=runtime, at_own_risk=["unlisted_family"])
    plan = review(cluster, model=glm, bundle="00ff", facts=[make_facts()] * 2).plan
    assert plan.at_own_risk == ("unlisted_family",)
    assert '"at_own_risk":["unlisted_family"]' in plan.server.env["MTPPP_ENGINE"]


@pytest.mark.parametrize("partition", [[3, 2], [7, 1]])
def test_a_partition_of_another_number_of_layers_is_refused(
    make_plan: Callable[..., Plan], partition: list[int]
) -> None:
    with pytest.raises((ConfigurationError, Refused), match=str(sum(partition))):
        make_plan(parallel={"pipeline": 2, "layer_partition": partition})


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("data-parallel-size", "2", 'a whole number of at least 1; is the text "2"'),
        ("data-parallel-size", 0, "a whole number of at least 1; is 0"),
        ("data-parallel-size", True, "a whole number of at least 1; is true"),
        ("data-parallel-size", [2], "a whole number of at least 1; is a list"),
        ("enable-expert-parallel", "false", 'true or false; is the text "false"'),
        ("enable-eplb", 0, "true or false; is 0"),
        ("prefill-context-parallel-size", "2", 'a whole number of at least 1; is the text "2"'),
        ("decode-context-parallel-size", 0, "a whole number of at least 1; is 0"),
        ("model-impl", True, "text; is true"),
    ],
)
def test_flags_that_decide_what_is_right_have_values_of_their_kind(
    make_cluster: Callable[..., Cluster], flag: str, value: Any, wanted: str
) -> None:
    cluster = make_cluster(serve={"args": {flag: value}})
    with pytest.raises(ConfigurationError) as raised:
        engine_spec(cluster, family="glm4_moe")
    assert raised.value.message == f"serve.args.{flag}: must be {wanted}"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max-num-seqs", "8"),
        ("max-num-seqs", -1),
        ("max-num-batched-tokens", 8.5),
        ("kv-cache-dtype", 8),
        ("enable-expert-parallel", "yes"),
    ],
)
def test_flags_on_which_memory_depends_have_values_of_their_kind(
    make_cluster: Callable[..., Cluster], flag: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"^serve.args.{flag}: must be "):
        serving(make_cluster(serve={"args": {flag: value}}))


@pytest.mark.parametrize("share", ["0.9", 0, 1.5, True])
def test_a_share_of_the_memory_is_a_number(
    make_plan: Callable[..., Plan], make_facts: Callable[..., HostFacts], share: Any
) -> None:
    gpu = {"name": "H100", "memory": 80 * 2**30, "compute_capability": "9.0"}
    with pytest.raises(ConfigurationError, match=r"^serve\.args\.gpu-memory-utilization: must be "):
        make_plan(*[make_facts(gpus=[gpu])] * 2, serve={"args": {"gpu-memory-utilization": share}})


def test_flags_without_a_value_are_as_if_not_given(make_cluster: Callable[..., Cluster]) -> None:
    args = {"data-parallel-size": None, "enable-eplb": None, "max-num-seqs": None}
    cluster = make_cluster(serve={"args": args})
    assert engine_spec(cluster, family="x") == engine_spec(make_cluster(), family="x")
    assert serving(cluster) == serving(make_cluster())


@pytest.mark.parametrize(
    ("changes", "watched"),
    [
        ({}, ("count", 7)),
        ({"invariants": {"on_violation": "stop", "sample_every": 50}}, ("stop", 50)),
        ({"invariants": {"sample_every": 0}}, ("off", 0)),
        ({"parallel": {"tensor": 2}, "speculative": None}, ("off", 0)),
        ({"serve": {"args": {"data-parallel-size": 2}}}, ("off", 0)),
    ],
)
def test_invariants_are_watched_where_there_are_stages(
    make_plan: Callable[..., Plan], changes: dict[str, Any], watched: tuple[str, int]
) -> None:
    plan = make_plan(**changes)
    assert (plan.invariants, plan.sample_every) == watched
    assert ("invariants" in plan.patches) == (watched[0] != "off")
    spec = json.loads(plan.server.env["MTPPP_ENGINE"])
    assert spec["invariants"] == watched[0]
    assert watched[0] == "off" or spec["sample_every"] == watched[1]
