"""What a valid file becomes, and what the models promise to the rest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from mtppp.cluster import (
    Cluster,
    Model,
    Node,
    Parallel,
    Ray,
    Runtime,
    Serve,
    Speculative,
    Ssh,
    load,
)

Text = Callable[..., str]
Loaded = Callable[[str], Cluster]


def test_a_minimal_file(cluster_text: Text, loaded: Loaded) -> None:
    assert loaded(cluster_text()) == Cluster(
        name="demo",
        model=Model(id="org/model", revision=None, config=None, served_name="model"),
        ssh=Ssh(
            user=None,
            identity_file=None,
            port=None,
            config_file=None,
            known_hosts=None,
            connect_timeout=10,
        ),
        gpus_per_node=None,
        nodes=(
            Node(host="a", address="10.0.0.1", gpus=8, transport="ssh"),
            Node(host="10.0.0.2", address="10.0.0.2", gpus=8),
        ),
        runtime=Runtime(vllm="0.32.0", python="/opt/vllm/bin/python", device="cuda", env={}),
        parallel=Parallel(tensor=1, pipeline=1, layer_partition="auto"),
        speculative=None,
        ray=Ray(base_port=26300, object_store_memory=None),
        serve=Serve(port=8000, args={}, stall_timeout=1800),
        secrets=(),
    )


def test_a_full_file(in_directory: Path, monkeypatch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    monkeypatch.setenv("HOME", "/home/op")
    cluster = loaded("""
name: glm-5.2
model:
  id: zai-org/GLM-5.2-FP8
  revision: refs/pr/1
  config: configs/glm
  served_name: glm
ssh:
  user: ubuntu
  identity_file: ~/.ssh/id_ed25519
  port: 2222
  config_file: /etc/ssh/other
  known_hosts: ../known_hosts
  proxy_jump: ["op@bastion:2222", inner]
  connect_timeout: 5
nodes:
  - {host: h100-a, address: 10.0.0.1, gpus: 8, user: root, port: 22, identity_file: ~/k}
  - {host: h100-b, address: 10.0.0.2, gpus: 8}
runtime:
  vllm: 0.32.0
  python: ~/vllm/bin/python
  env: {NCCL_IB_HCA: "=mlx5_0,mlx5_3", NCCL_DEBUG_LEVEL: 3}
parallel: {tensor: 8, pipeline: 2, layer_partition: [42, 36]}
speculative: {tokens: 3}
serve:
  port: 9000
  args:
    max-model-len: 131072
    kv_cache_dtype: fp8
    enable-prefix-caching: false
    gpu-memory-utilization: 0.9
    compilation-config: {mode: 3, cudagraph_capture_sizes: [1, 2]}
    seed:
  stall_timeout: 60
ray: {base_port: 20000, object_store_memory: 1073741824}
secrets: [HF_TOKEN, VLLM_API_KEY]
""")
    assert cluster == Cluster(
        name="glm-5.2",
        model=Model(
            id="zai-org/GLM-5.2-FP8",
            revision="refs/pr/1",
            config=in_directory / "configs/glm",
            served_name="glm",
        ),
        ssh=Ssh(
            user="ubuntu",
            identity_file=Path("/home/op/.ssh/id_ed25519"),
            port=2222,
            config_file=Path("/etc/ssh/other"),
            known_hosts=in_directory.parent / "known_hosts",
            proxy_jump="op@bastion:2222,inner",
            connect_timeout=5,
        ),
        nodes=(
            Node(
                host="h100-a",
                address="10.0.0.1",
                gpus=8,
                user="root",
                port=22,
                identity_file=Path("/home/op/k"),
            ),
            Node(host="h100-b", address="10.0.0.2", gpus=8),
        ),
        runtime=Runtime(
            vllm="0.32.0",
            python="~/vllm/bin/python",
            env={"NCCL_IB_HCA": "=mlx5_0,mlx5_3", "NCCL_DEBUG_LEVEL": "3"},
        ),
        parallel=Parallel(tensor=8, pipeline=2, layer_partition=(42, 36)),
        speculative=Speculative(method="mtp", tokens=3),
        ray=Ray(base_port=20000, object_store_memory=2**30),
        serve=Serve(
            port=9000,
            args={
                "max-model-len": 131072,
                "kv-cache-dtype": "fp8",
                "enable-prefix-caching": False,
                "gpu-memory-utilization": 0.9,
                "compilation-config": {"mode": 3, "cudagraph_capture_sizes": [1, 2]},
                "seed": None,
            },
            stall_timeout=60,
        ),
        secrets=("HF_TOKEN", "VLLM_API_KEY"),
    )


def test_nodes_in_short(cluster_text: Text, loaded: Loaded) -> None:
    nodes = "nodes: [10.0.0.1, ubuntu@10.0.0.2, '2001:DB8::1', {host: 10.0.0.4, gpus: 4}]"
    assert loaded(cluster_text("gpus_per_node: 8", nodes=nodes)).nodes == (
        Node(host="10.0.0.1", address="10.0.0.1", gpus=8),
        Node(host="10.0.0.2", address="10.0.0.2", gpus=8, user="ubuntu"),
        Node(host="2001:DB8::1", address="2001:db8::1", gpus=8),
        Node(host="10.0.0.4", address="10.0.0.4", gpus=4),
    )


def test_a_section_of_comments_alone_is_as_if_absent(cluster_text: Text, loaded: Loaded) -> None:
    emptied = "ssh:\nparallel:\nspeculative:\nserve:\n  args:\n  # seed: 1\nray:\nsecrets:"
    assert loaded(cluster_text(emptied)) == loaded(cluster_text())


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("zai-org/GLM-5.2-FP8", ("zai-org/GLM-5.2-FP8", False, "GLM-5.2-FP8")),
        ("/models/glm/", ("/models/glm", True, "glm")),
        ("/models/./a/../glm", ("/models/glm", True, "glm")),
        ("./models/glm", ("{directory}/models/glm", True, "glm")),
        ("../glm", ("{parent}/glm", True, "glm")),
        ("./", ("{directory}", True, "{name}")),
        ("~/models/glm", ("~/models/glm", True, "glm")),
    ],
)
def test_model_id(
    in_directory: Path,
    cluster_text: Text,
    loaded: Loaded,
    written: str,
    expected: tuple[str, bool, str],
) -> None:
    model = loaded(cluster_text(model=f"model: {{id: {written}}}")).model
    identity, is_path, served_name = expected
    place = {"directory": in_directory, "parent": in_directory.parent, "name": in_directory.name}
    assert model.id == identity.format(**place)
    assert model.is_path is is_path
    assert model.served_name == served_name.format(**place)


def test_paths_are_relative_to_the_file_and_not_to_the_working_directory(
    in_directory: Path, cluster_text: Text
) -> None:
    path = Path("sub/cluster.yaml")
    path.parent.mkdir()
    path.write_text(cluster_text(model="model: {id: ./m, config: c.json}"), encoding="utf-8")
    model = load(path).cluster.model
    assert model.id == f"{in_directory}/sub/m"
    assert model.config == in_directory / "sub/c.json"


def test_relative_paths_need_to_know_where_the_file_is() -> None:
    for fields in ({"id": "./m"}, {"id": "o/m", "config": "c.json"}):
        with pytest.raises(ValidationError, match="must be an absolute path"):
            Model.model_validate(fields)


def test_what_was_validated_stays_valid(cluster_text: Text, loaded: Loaded) -> None:
    cluster = loaded(
        cluster_text(
            "gpus_per_node: 8",
            "parallel: {pipeline: 2, layer_partition: [3, 3]}",
            "ssh: {identity_file: k}",
            model="model: {id: ./m}",
        )
    )
    assert Cluster.model_validate(cluster.model_dump()) == cluster
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize(
    "section", [Cluster, Model, Node, Parallel, Ray, Runtime, Serve, Speculative, Ssh]
)
def test_every_key_is_described_and_frozen(section: type[BaseModel]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert field.description, name
        assert field.description.endswith((".", ")")), name
    assert section.model_config["frozen"]
    assert section.model_config["extra"] == "forbid"


def test_importing_is_light() -> None:
    code = "import mtppp.cluster, sys; print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    heavy = {"paramiko", "httpx", "rich", "click", "asyncio", "mtppp.plan", "mtppp.hosts"}
    assert heavy.isdisjoint(shown.stdout.split())


def test_the_gpu_type_of_the_cluster_is_that_of_nodes_that_have_none(
    cluster_text: Text, loaded: Loaded
) -> None:
    nodes = """nodes:
  - {host: a, address: 10.0.0.1, gpus: 8}
  - {host: 10.0.0.2, gpus: 8, gpu_type: H200}"""
    # The cluster's value may stand behind the nodes.
    cluster = loaded(cluster_text("gpu_type: H100-80GB", nodes=nodes))
    assert [node.gpu_type for node in cluster.nodes] == ["H100-80GB", "H200"]


def test_a_gpu_type_that_is_not_known_gets_the_nearest_one(
    problems: Callable[[str], list[str]], cluster_text: Text
) -> None:
    (problem,) = problems(cluster_text("gpu_type: h100-80"))
    told = 'must be a GPU type that mtppp knows; is the text "h100-80"; did you mean H100-80GB?'
    assert problem.endswith(f"gpu_type: {told}")
