"""What on the hosts is not as the file needs it, and which model they have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mtppp.cluster import Cluster
from mtppp.console import Console, Step
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.hosts.facts import HostFacts
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Node
from mtppp.model.config import ModelConfig
from mtppp.phases.deployment import Deployment
from mtppp.phases.facts import GatherFacts, gather, problems
from mtppp.phases.find_model import FindModel, compare_nodes, on_nodes
from mtppp.phases.make_plan import make_plan

FILE = Path("cluster.yaml")
GPU = {"name": "H100", "memory": 80 * 2**30, "compute_capability": "9.0"}


def neighbour(name: str, node: int, **changes: Any) -> dict[str, Any]:
    """A deployment that a host runs already."""
    directory = f"/var/tmp/mtppp-1000/{name}/{node}"
    return {"directory": directory, "device": "cuda", "by": "ann@desk", "since": "T", **changes}


@pytest.fixture
def told(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> Callable[..., list[str]]:
    """What is told of two hosts, the second with these facts."""

    def told(cluster: dict[str, Any] | None = None, **second: Any) -> list[str]:
        facts = [make_facts(gpus=[GPU]), make_facts(gpus=[GPU], **second)]
        return list(problems(make_cluster(**cluster or {}), facts))

    return told


def test_hosts_as_they_should_be(told: Callable[..., list[str]]) -> None:
    assert told() == []


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (
            {"versions": {"vllm": "0.31.0", "ray": "2.60.0", "torch": "2.13.0"}},
            ["b: /opt/vllm/bin/python has vLLM 0.31.0; runtime.vllm asks for 0.32.0"],
        ),
        (
            {"versions": {"vllm": None, "ray": "2.60.0", "torch": "2.13.0"}},
            ["b: /opt/vllm/bin/python has no vLLM; runtime.vllm asks for 0.32.0"],
        ),
        (
            {"versions": {"vllm": "0.32.0", "ray": "2.9.3", "torch": "2.13.0"}},
            [
                "b: Ray 2.9.3 is too old: token authentication needs 2.60 or newer",
                "Ray must be the same on all nodes: a 2.60.0, b 2.9.3",
            ],
        ),
        (
            {"versions": {"vllm": "0.32.0", "ray": None, "torch": "2.13.0"}},
            [
                "b: /opt/vllm/bin/python has no Ray; vLLM's own images have had none since 0.19",
                "Ray must be the same on all nodes: a 2.60.0, b None",
            ],
        ),
        (
            {"versions": {"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.12.0"}},
            ["torch must be the same on all nodes: a 2.13.0, b 2.12.0"],
        ),
        ({"python_version": "3.11.9"}, []),
        (
            {"python_version": "3.12.1"},
            ["Python must be the same on all nodes: a 3.11, b 3.12"],
        ),
        (
            {"interface": None},
            ["b: no interface has the address 10.0.0.2; it has lo 127.0.0.1, eth0 10.0.0.1"],
        ),
        (
            {
                "ports_taken": [
                    [26301, "deployment other"],
                    [26302, "deployment other"],
                    [8000, "pid 7: nginx"],
                ]
            },
            [
                "b: ports 26301, 26302 are taken (deployment other);"
                " set ray.base_port to a free one",
                "b: port 8000 is taken (pid 7: nginx); set serve.port to a free one",
            ],
        ),
        (
            {"deployments": [neighbour("other", 1)]},
            [
                "b: its GPUs are taken by deployment other, launched by ann@desk at T;"
                " stop that, or use another host"
            ],
        ),
        ({"deployments": [neighbour("other", 1, device="cpu")]}, []),
        ({"deployments": [neighbour("demo", 1)]}, []),
        (
            {"deployments": [neighbour("demo", 0)]},
            [
                "b: demo runs there as nodes[0], launched by ann@desk at T, and the file has the"
                " host as nodes[1]: stop it with the file it was launched from"
            ],
        ),
        (
            {"ports_forbidden": [80]},
            ["b: ubuntu may not listen on 80; set serve.port to 1024 or higher"],
        ),
        (
            {"model_config": None},
            [
                "b: no model is at /models/demo: there is no config.json that ubuntu may read;"
                " copy it there, or set model.id to a path that every node has"
            ],
        ),
        (
            {"model_path": "/home/b/demo"},
            ["model.id must be the same on all nodes: a /models/demo, b /home/b/demo"],
        ),
    ],
)
def test_each_problem_is_told(
    told: Callable[..., list[str]], facts: dict[str, Any], lines: list[str]
) -> None:
    assert told(**facts) == lines


def test_too_few_gpus(told: Callable[..., list[str]]) -> None:
    nodes = [{"host": h, "address": f"10.0.0.{i}", "gpus": 8} for i, h in enumerate("ab", 1)]
    assert told({"nodes": nodes}) == [
        "a: nodes[0].gpus is 8, but the driver shows 1 GPUs",
        "b: nodes[1].gpus is 8, but the driver shows 1 GPUs",
    ]


class Answering:
    """A node whose host is as it is told."""

    def __init__(self, host: str, facts: HostFacts) -> None:
        self.host = host
        self._facts = facts
        self.asked: dict[str, Any] = {}

    def facts(self, **asked: Any) -> HostFacts:
        self.asked = asked
        return self._facts


def gathered(cluster: Cluster, *nodes: Answering) -> tuple[Deployment, Step]:
    deployment = Deployment(cluster=cluster, nodes=[cast(Node, node) for node in nodes], file=FILE)
    step = Step(Console(), "hosts")
    GatherFacts().run(deployment, step)
    return deployment, step


def test_what_hosts_are_asked(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> None:
    first = Answering("a", make_facts(gpus=[GPU]))
    second = Answering("b", make_facts(gpus=[GPU], hostname="second"))
    deployment, step = gathered(make_cluster(), first, second)
    assert [facts.hostname for facts in deployment.facts] == ["host", "second"]
    assert step.note == "vLLM 0.32.0, Ray 2.60.0, Python 3.11.7"
    assert first.asked == {
        "address": "10.0.0.1",
        "model_path": "/models/demo",
        "ports": [26300, *range(26301, 26307), 26308, 8000],
        "hub": None,
    }
    assert second.asked == {
        "address": "10.0.0.2",
        "model_path": "/models/demo",
        "ports": list(range(26301, 26307)),
        "hub": None,
    }


def test_one_problem_is_the_message_and_several_are_listed(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> None:
    good, bad = Answering("a", make_facts(gpus=[GPU])), Answering("b", make_facts())
    with pytest.raises(MtpppError) as raised:
        gathered(make_cluster(), good, bad)
    assert raised.value.message == "b: nodes[1].gpus is 1, but the driver shows 0 GPUs"
    assert raised.value.details == ()
    with pytest.raises(MtpppError) as raised:
        gathered(make_cluster(), bad, bad)
    assert raised.value.message == "the hosts are not as the file says"
    assert len(raised.value.details) == 2


def test_a_deployment_that_runs_takes_its_own_ports(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> None:
    own = [26300, "deployment demo"]
    first = Answering("a", make_facts(gpus=[GPU], ports_taken=[own]))
    running = make_facts(gpus=[GPU], deployments=[neighbour("demo", 1)])
    deployment, _ = gathered(make_cluster(), first, Answering("b", running))
    assert deployment.running
    deployment, _ = gathered(make_cluster(), first, Answering("b", make_facts(gpus=[GPU])))
    assert not deployment.running
    with pytest.raises(MtpppError, match=r"a: port 26300 is taken \(deployment demo\); set ray"):
        gathered(make_cluster(name="other"), first, Answering("b", make_facts(gpus=[GPU])))


# ---- the model -------------------------------------------------------------------------------


def test_the_model_is_decided_on_before_any_host_is_touched(
    make_cluster: Callable[..., Cluster], demo_directory: Path
) -> None:
    deployment = Deployment(
        cluster=make_cluster(model={"id": str(demo_directory)}), nodes=[], file=FILE
    )
    step = Step(Console(), "model")
    FindModel().run(deployment, step)
    assert deployment.model is not None
    assert deployment.model.model_type == "glm4_moe"
    assert step.note == f"{demo_directory} (its config.json)"


def test_a_model_that_only_nodes_have_is_left_for_later(
    make_cluster: Callable[..., Cluster],
) -> None:
    deployment = Deployment(cluster=make_cluster(), nodes=[], file=FILE)
    step = Step(Console(), "model")
    FindModel().run(deployment, step)
    assert deployment.config is None
    assert step.note == "/models/demo: to be read on the nodes"


def test_a_directory_that_we_may_not_look_into_says_nothing(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    deployment = Deployment(cluster=make_cluster(), nodes=[], file=FILE)
    monkeypatch.setattr(Path, "is_dir", refuse)  # root may look everywhere
    FindModel().run(deployment, Step(Console(), "model"))
    assert deployment.config is None


def test_a_configuration_on_the_operators_side_counts(
    make_cluster: Callable[..., Cluster], demo_directory: Path
) -> None:
    model = {"id": "/models/demo", "config": str(demo_directory)}
    deployment = Deployment(cluster=make_cluster(model=model), nodes=[], file=FILE)
    FindModel().run(deployment, Step(Console(), "model"))
    assert deployment.config is not None


def test_nodes_must_hold_the_same_model(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts]
) -> None:
    facts = [make_facts(), make_facts()]
    config = on_nodes(make_cluster().model, ["a", "b"], facts)
    assert config is not None
    assert config.origin == "a:/models/demo/config.json"
    compare_nodes(config, ["a", "b"], facts)

    text = facts[0].model_config
    assert text is not None
    newer = json.dumps(json.loads(text) | {"transformers_version": "9.9"})
    compare_nodes(config, ["a", "b"], [facts[0], make_facts(model_config=newer)])

    other = json.dumps(json.loads(text) | {"num_hidden_layers": 7})
    with pytest.raises(ConfigurationError) as raised:
        compare_nodes(config, ["a", "b"], [facts[0], make_facts(model_config=other)])
    assert raised.value.message == (
        "b holds another model: its config.json differs from a:/models/demo/config.json"
    )


def test_a_model_of_the_hub_need_not_be_on_the_nodes_yet(
    make_facts: Callable[..., HostFacts],
) -> None:
    config = ModelConfig({"model_type": "x"}, "hub", None)
    compare_nodes(config, ["a"], [make_facts(model_config=None)])


def test_a_model_of_the_hub_is_found_in_the_nodes_cache(
    make_cluster: Callable[..., Cluster],
    tmp_path: Path,
    demo_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where this side cannot reach the hub; and it must be the same on all."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    store = tmp_path / "hf/hub/models--org--demo"
    (store / "refs").mkdir(parents=True)
    (store / "refs/main").write_text("abc123")
    (store / "snapshots").mkdir()
    (store / "snapshots/abc123").symlink_to(demo_directory)
    runtime = {"vllm": "0.32.0", "python": sys.executable, "env": {"HF_HOME": f"{tmp_path}/hf"}}
    cluster = make_cluster(model={"id": "org/demo"}, runtime=runtime)
    nodes = [Node(LocalTransport(host), sys.executable) for host in "ab"]
    deployment = Deployment(cluster=cluster, nodes=nodes, file=FILE)
    FindModel().run(deployment, Step(Console(), "model"))
    assert deployment.config is None
    deployment.facts = gather(deployment)
    assert make_plan(deployment).model.layer_count == 6
    assert deployment.config is not None
    assert deployment.config.origin == "a:org/demo/config.json"

    # Another commit, of another model, is what `main` of the second node is.
    (store / "snapshots/def456").mkdir()
    text = (demo_directory / "config.json").read_text()
    (store / "snapshots/def456/config.json").write_text(text.replace('"rope_theta": ', '"x": '))
    (store / "refs/main").write_text("def456")
    other = gather(deployment)[1]
    with pytest.raises(ConfigurationError, match="b holds another model") as caught:
        compare_nodes(deployment.config, ["a", "b"], [deployment.facts[0], other])
    assert "model.revision" in caught.value.hint


def test_a_model_that_nobody_has_is_told_as_the_hub_told_it(
    make_cluster: Callable[..., Cluster],
    make_facts: Callable[..., HostFacts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    nodes = [Node(LocalTransport(host), sys.executable) for host in "ab"]
    deployment = Deployment(cluster=make_cluster(model={"id": "org/none"}), nodes=nodes, file=FILE)
    FindModel().run(deployment, Step(Console(), "model"))
    deployment.facts = [make_facts(model_config=None)] * 2
    with pytest.raises(MtpppError, match="org/none"):
        make_plan(deployment)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_configuration_that_is_none(
    make_cluster: Callable[..., Cluster], make_facts: Callable[..., HostFacts], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"^a:/models/demo/config\.json: "):
        on_nodes(make_cluster().model, ["a"], [make_facts(model_config=text)])
