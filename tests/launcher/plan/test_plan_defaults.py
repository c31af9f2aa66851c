from __future__ import annotations

from pathlib import Path

import pytest

from mtppp.cluster import Cluster, parse
from mtppp.hosts.facts import GpuFacts, HostFacts, RdmaPort
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.plan.defaults import Defaults, choose_defaults

DEMO = Path(__file__).parents[3] / "cluster_configs/models/demo-glm4-moe"


@pytest.fixture(scope="module")
def glm_5_2() -> ModelFacts:
    return read_facts(find_config("zai-org/GLM-5.2-FP8").values)


@pytest.fixture(scope="module")
def glm_4_moe() -> ModelFacts:
    return read_facts(find_config(str(DEMO)).values)


def cluster(
    *, tensor: int = 8, pipeline: int = 2, tokens: int = 3, runtime: str = "", args: str = ""
) -> Cluster:
    text = f"""
name: x
model: {{id: org/m}}
gpus_per_node: 8
nodes: [{{host: a, address: 10.0.0.1}}, {{host: b, address: 10.0.0.2}}]
runtime: {{vllm: "0.32.0", python: /p{runtime}}}
parallel: {{tensor: {tensor}, pipeline: {pipeline}}}
speculative: {{tokens: {tokens}}}
serve: {{args: {{{args}}}}}
"""
    return parse(text, Path("cluster.yaml")).cluster


def hosts(gpu: str | None = "H100-80GB") -> list[HostFacts]:
    return [
        HostFacts.assumed(
            address, python="/p", vllm="0.32.0", gpus=[GpuFacts.of_type(gpu)] * 8 if gpu else ()
        )
        for address in ("10.0.0.1", "10.0.0.2")
    ]


def withheld(defaults: Defaults) -> set[str]:
    return {entry.name for entry in defaults.withheld}


def test_glm_5_2_on_h100(glm_5_2: ModelFacts) -> None:
    defaults = choose_defaults(cluster(), glm_5_2, hosts())
    assert defaults.env_values() == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "900",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    }
    assert defaults.arg_values() == {
        "gpu-memory-utilization": 0.9,
        "max-num-batched-tokens": 8192,
        "max-num-seqs": 128,
        "enable-prefix-caching": True,
    }
    assert withheld(defaults) == {
        "NCCL_IB_HCA",
        "NCCL transport",
        "compilation-config",
        "enable-expert-parallel",
        "ulimits",
    }
    assert defaults.warnings == ()


def test_every_setting_and_every_refusal_has_a_reason(glm_5_2: ModelFacts) -> None:
    defaults = choose_defaults(cluster(), glm_5_2, hosts())
    for entry in (*defaults.env, *defaults.args, *defaults.withheld):
        assert len(entry.reason) > 30


def test_what_the_file_says_stands(glm_5_2: ModelFacts) -> None:
    said = cluster(
        runtime=', env: {VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: "60", NCCL_IB_HCA: "=mlx5_0"}',
        args="max-num-seqs: 4, enable-prefix-caching: false",
    )
    defaults = choose_defaults(said, glm_5_2, hosts())
    assert "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS" not in defaults.env_values()
    assert defaults.arg_values().keys() == {"gpu-memory-utilization", "max-num-batched-tokens"}
    assert "NCCL_IB_HCA" not in withheld(defaults)


def test_nothing_is_chosen_for_cpu_hosts(glm_4_moe: ModelFacts) -> None:
    chosen = choose_defaults(cluster(runtime=", device: cpu"), glm_4_moe, hosts(None))
    assert chosen == Defaults()


@pytest.mark.parametrize(("gpu", "is_set"), [("H100-80GB", True), ("H200", True), ("B200", False)])
def test_block_fp8_on_hopper(glm_5_2: ModelFacts, gpu: str, is_set: bool) -> None:
    env = choose_defaults(cluster(), glm_5_2, hosts(gpu)).env_values()
    assert ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER" in env) == is_set


def test_block_fp8_without_knowing_the_gpus(glm_5_2: ModelFacts) -> None:
    defaults = choose_defaults(cluster(), glm_5_2, hosts(None))
    assert "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER" in withheld(defaults)


def test_a_model_without_block_fp8(glm_4_moe: ModelFacts) -> None:
    defaults = choose_defaults(cluster(), glm_4_moe, hosts())
    names = {*defaults.env_values(), *withheld(defaults)}
    assert "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER" not in names


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 128), (3, 128), (5, 85), (7, 64)])
def test_requests_stay_within_cuda_graphs(
    glm_4_moe: ModelFacts, tokens: int, sequences: int
) -> None:
    args = choose_defaults(cluster(tokens=tokens), glm_4_moe, hosts()).arg_values()
    assert args["max-num-seqs"] == sequences


def test_prefix_caching_is_left_to_vllm_where_layers_are_recurrent() -> None:
    hybrid = read_facts(QWEN3_NEXT)
    assert hybrid.stack is not None
    defaults = choose_defaults(cluster(), hybrid, hosts())
    assert "enable-prefix-caching" in withheld(defaults)


QWEN3_NEXT = {
    **{"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
    **{"dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48},
    **{"intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    **{"max_position_embeddings": 262144, "tie_word_embeddings": False},
}


def test_warnings(glm_5_2: ModelFacts) -> None:
    small = [
        HostFacts(**{**_fields(host), "shm_bytes": 2**30 * size})
        for host, size in zip(hosts(), (10, 64), strict=True)
    ]
    warnings = choose_defaults(cluster(tokens=5), glm_5_2, small).warnings
    assert len(warnings) == 2
    assert warnings[0].startswith("a: /dev/shm has 10 GiB")
    assert "reads the KV cache 6 times" in warnings[1]
    assert not choose_defaults(cluster(tokens=5), glm_5_2, hosts("B200")).warnings


def port(
    name: str, *near: int, active: bool = True, link: str = "InfiniBand", number: int = 1
) -> RdmaPort:
    return RdmaPort(name, number, active, link, near)


GOOD = (port("mlx5_4", 0), port("mlx5_0", 1))
STORAGE = (port("mlx5_2"), port("mlx5_3", link="Ethernet"), port("mlx5_9", 0, active=False))


def with_ports(*held: tuple[RdmaPort, ...], **limits: int | None) -> list[HostFacts]:
    known = {"nofile": 1 << 20, "memlock": None} | limits
    return [
        HostFacts(**{**_fields(host), "rdma": ports, "limits": known})
        for host, ports in zip(hosts(), held, strict=True)
    ]


def test_infiniband_ports_are_named_where_nccl_would_take_others_too(
    glm_5_2: ModelFacts,
) -> None:
    defaults = choose_defaults(cluster(), glm_5_2, with_ports(GOOD + STORAGE, STORAGE + GOOD))
    # In the order of the GPUs; each exactly.
    assert defaults.env_values()["NCCL_IB_HCA"] == "=mlx5_4:1,mlx5_0:1"
    reason = next(entry.reason for entry in defaults.env if entry.name == "NCCL_IB_HCA")
    assert reason.endswith("NCCL would take mlx5_2:1, mlx5_3:1 as well")
    assert defaults.warnings == ()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (GOOD, GOOD, "NCCL finds them"),
        (GOOD + STORAGE, (port("mlx5_7", 0), port("mlx5_0", 1)), "b mlx5_7:1, mlx5_0:1"),
        (GOOD, STORAGE, "b has no active InfiniBand port below the PCIe root port of a GPU"),
    ],
)
def test_infiniband_is_left_to_nccl_where_nothing_better_is_known(
    glm_5_2: ModelFacts, first: tuple[RdmaPort, ...], second: tuple[RdmaPort, ...], reason: str
) -> None:
    defaults = choose_defaults(cluster(), glm_5_2, with_ports(first, second))
    assert "NCCL_IB_HCA" not in defaults.env_values()
    entry = next(entry for entry in defaults.withheld if entry.name == "NCCL_IB_HCA")
    assert reason in entry.reason


def test_hosts_without_rdma_or_with_low_limits_are_warned_of(glm_5_2: ModelFacts) -> None:
    none = choose_defaults(cluster(), glm_5_2, with_ports((), GOOD, nofile=1024, memlock=2**16))
    assert [line.partition(";")[0] for line in none.warnings] == [
        "a: no RDMA port is active",
        "b: a process may lock 0.00 GiB of memory, and RDMA needs memlock unlimited: set it in "
        "/etc/security/limits.conf, or in sshd's unit",
        "b: a process may open 1024 files",
    ]


def _fields(host: HostFacts) -> dict[str, object]:
    return {name: getattr(host, name) for name in HostFacts.__dataclass_fields__}
