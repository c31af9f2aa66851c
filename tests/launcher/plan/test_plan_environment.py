"""The whole environment of a node's processes, and what may differ between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtppp.hosts.facts import HostFacts
from mtppp.plan.environment import NOT_CARRIED_OVER, node_environment
from mtppp.plan.plan import Plan

PLANNED = {
    "MTPPP_DEPLOYMENT": "demo",
    "MTPPP_RUN_DIR": "/var/tmp/mtppp-1000/demo/0",
    "MTPPP_ENGINE": "{}",
    "PYTHONPATH": "/var/tmp/mtppp-1000/plugins/00ff",
    "PATH": "/opt/vllm/bin:/usr/bin:/bin",
    "SPT_NOENV": "1",
    "VLLM_HOST_IP": "10.0.0.1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "=eth0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "/var/tmp/mtppp-1000/demo/0/ray-token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_NUM_REDIS_GET_RETRIES": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
    "VLLM_CONFIG_ROOT": "/var/tmp/mtppp-1000/demo/0/vllm-config",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_RAY_BUNDLE_INDICES": "0,1,2,3",
    "VLLM_PP_LAYER_PARTITION": "42,36",
}
CPU = {
    "MTPPP_DEVICE": "cpu",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
OF_VLLM_ITSELF = {"VLLM_HOST_IP"}
"""What vLLM's driver sends to no worker, whatever the list says."""


def environment(**changes: Any) -> dict[str, str]:
    arguments: dict[str, Any] = {
        "deployment": "demo",
        "directory": "/var/tmp/mtppp-1000/demo/0",
        "plugins": "/var/tmp/mtppp-1000/plugins/00ff",
        "python": "/opt/vllm/bin/python",
        "path": "/usr/bin:/bin",
        "address": "10.0.0.1",
        "interface": "eth0",
        "device": "cuda",
        "engine": "{}",
        "layer_partition": (42, 36),
        "ranks": 4,
        "user": {},
    }
    return node_environment(**arguments | changes)


def test_on_gpus() -> None:
    assert environment() == PLANNED


def test_on_cpu_hosts() -> None:
    assert environment(device="cpu") == PLANNED | CPU


def test_one_stage_has_no_partition() -> None:
    expected = {k: v for k, v in PLANNED.items() if k != "VLLM_PP_LAYER_PARTITION"}
    assert environment(layer_partition=()) == expected


def test_the_file_may_choose_what_is_not_planned() -> None:
    user = {"NCCL_IB_HCA": "=mlx5_0", "OMP_NUM_THREADS": "4"}
    assert environment(device="cpu", user=user) == PLANNED | CPU | user
    assert environment(user={"PATH": "/mine", "SPT_NOENV": "0"}) == PLANNED


def test_what_differs_between_nodes_is_not_carried_over(
    make_plan: Callable[..., Plan], make_facts: Callable[..., HostFacts]
) -> None:
    plan = make_plan(
        make_facts(),
        make_facts(uid=1001, path="/bin", python="/srv/python", interface="ib0", user="other"),
    )
    first, second = (node.ray.env for node in plan.nodes)
    assert first.keys() == second.keys()
    differing = {name for name in first if first[name] != second[name]}
    assert differing - OF_VLLM_ITSELF == set(NOT_CARRIED_OVER)
