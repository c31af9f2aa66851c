"""Every command line of a launch, whole."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import pytest

from mtppp.errors import ConfigurationError
from mtppp.plan import commands
from mtppp.plan.ports import ray_ports

PYTHON = "/opt/vllm/bin/python"
RAY_NODE = (
    "--node-manager-port=26301",
    "--object-manager-port=26302",
    "--runtime-env-agent-port=26303",
    "--dashboard-agent-listen-port=26304",
    "--dashboard-agent-grpc-port=26305",
    "--metrics-export-port=26306",
    "--min-worker-port=26320",
    "--max-worker-port=26399",
    "--temp-dir=/var/tmp/mtppp-1000/r/0a1b2c3d",
)
RAY_LAST = ("--disable-usage-stats", "--log-style=record", "--log-color=false", "--block")


def ray_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "python": PYTHON,
        "address": "10.0.0.1",
        "ports": ray_ports(26300),
        "directory": "/var/tmp/mtppp-1000/r/0a1b2c3d",
        "gpus": 8,
        "store": None,
    } | changes


def serve_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "python": PYTHON,
        "model": "/models/demo",
        "revision": None,
        "served_name": "demo",
        "address": "10.0.0.1",
        "port": 8000,
        "tensor": 8,
        "pipeline": 2,
        "draft_tokens": 3,
        "device": "cuda",
        "gate": False,
        "args": {},
    } | changes


def test_ray_head() -> None:
    assert commands.ray_head(**ray_arguments()) == (
        PYTHON,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--port=26300",
        "--dashboard-port=26307",
        "--include-dashboard=false",
        "--ray-client-server-port=26308",
        "--node-ip-address=10.0.0.1",
        *RAY_NODE,
        "--num-gpus=8",
        "--num-cpus=2",
        "--object-store-memory=536870912",
        *RAY_LAST,
    )


def test_ray_worker() -> None:
    worker = commands.ray_worker(
        **ray_arguments(address="10.0.0.2", gpus=4, store=2**30), head="10.0.0.1:26300"
    )
    assert worker == (
        PYTHON,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--address=10.0.0.1:26300",
        "--node-ip-address=10.0.0.2",
        *RAY_NODE,
        "--num-gpus=4",
        "--num-cpus=2",
        "--object-store-memory=1073741824",
        *RAY_LAST,
    )


def test_placement() -> None:
    assert commands.placement(python=PYTHON, timeout=600.0) == (
        PYTHON,
        "-m",
        "mtppp_patches.placement",
        "--timeout=600",
    )


SERVE_FIRST = (PYTHON, "-m", "vllm.entrypoints.cli.main", "serve")
SERVE_MIDDLE = (
    "--served-model-name",
    "demo",
    "--host",
    "10.0.0.1",
    "--port",
    "8000",
    "--tensor-parallel-size",
    "8",
    "--pipeline-parallel-size",
    "2",
    "--distributed-executor-backend",
    "ray",
    "--async-scheduling",
)


def test_server_with_mtp() -> None:
    argv = commands.server(**serve_arguments(args={"max-model-len": 131072}))
    assert argv == (
        *SERVE_FIRST,
        "/models/demo",
        *SERVE_MIDDLE,
        "--speculative-config",
        '{"method": "mtp", "num_speculative_tokens": 3}',
        "--max-model-len=131072",
    )


def test_the_gate_is_outside_of_any_other_middleware() -> None:
    argv = commands.server(**serve_arguments(gate=True, args={"middleware": "theirs.M"}))
    assert argv[-2:] == ("--middleware=theirs.M", "--middleware=mtppp_patches.gate.Gate")
    several = commands.server(**serve_arguments(gate=True, args={"data-parallel-size": 2}))
    assert several[-2:] == ("--middleware=mtppp_patches.gate.Gate", "--api-server-count=1")


def test_server_of_a_revision_without_speculation() -> None:
    argv = commands.server(
        **serve_arguments(model="zai-org/GLM-5.2-FP8", revision="abc123", draft_tokens=0)
    )
    assert argv == (
        *SERVE_FIRST,
        "zai-org/GLM-5.2-FP8",
        "--revision",
        "abc123",
        *SERVE_MIDDLE,
    )


def test_server_on_cpu_hosts_runs_eagerly_unless_the_file_says_otherwise() -> None:
    argv = commands.server(**serve_arguments(device="cpu", draft_tokens=0))
    assert argv == (
        *SERVE_FIRST,
        "/models/demo",
        *SERVE_MIDDLE,
        "--enforce-eager",
        "--block-size=32",
    )
    changed = commands.server(
        **serve_arguments(
            device="cpu", draft_tokens=0, args={"block-size": 64, "enforce-eager": None}
        )
    )
    assert changed == (*SERVE_FIRST, "/models/demo", *SERVE_MIDDLE, "--block-size=64")


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (None, ()),
        ([], ()),
        (True, ("--x",)),
        (False, ("--no-x",)),
        (1, ("--x=1",)),
        (0, ("--x=0",)),
        (0.9, ("--x=0.9",)),
        ("fp8", ("--x=fp8",)),
        ("", ("--x=",)),
        ("-1", ("--x=-1",)),
        ("--trust-remote-code", ("--x=--trust-remote-code",)),
        ("a b=c", ("--x=a b=c",)),
        ("ü", ("--x=ü",)),
        ({}, ("--x={}",)),
        ({"a": {"b": [1, True, None]}}, ('--x={"a": {"b": [1, true, null]}}',)),
        (["a", "b"], ("--x", "a", "b")),
        ([1, 2.5, True], ("--x", "1", "2.5", "true")),
        ([{"name": "a"}, {"name": "b"}], ("--x", '{"name": "a"}', '{"name": "b"}')),
        ([["a", 1], "b"], ("--x", '["a", 1]', "b")),
        (["-a"], ("--x=-a",)),
    ],
)
def test_flags(value: Any, flags: tuple[str, ...]) -> None:
    assert commands.flags({"x": value}) == flags


def test_flags_keep_the_order_of_the_file() -> None:
    assert commands.flags({"b": 1, "a": True, "c": ["x", "y"]}) == ("--b=1", "--a", "--c", "x", "y")


@pytest.mark.parametrize("items", [["a", "-b"], ["-1", "a"], [1, -0.5]])
def test_a_list_in_which_an_item_would_be_read_as_a_flag_is_refused(items: list[Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        commands.flags({"allowed-origins": items})
    dashed = next(i for i, item in enumerate(items) if str(item).startswith("-"))
    assert raised.value.message == (
        f"serve.args.allowed-origins[{dashed}]: '{items[dashed]}' begins with a dash:"
        " in a list of several, vllm serve would take it for a flag"
    )
    assert raised.value.hint == "rename it, or make it the only item"


@pytest.mark.parametrize(
    ("value", "read"),
    [("-5.5", ["-5.5"]), (["--other"], ["--other"]), (["a", "b"], ["a", "b"]), ("", [""])],
)
def test_a_parser_reads_the_values_back(value: Any, read: list[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--x", nargs="+")
    parser.add_argument("--other", action="store_true")
    parsed = parser.parse_args(list(commands.flags({"x": value})))
    assert parsed.x == read
    assert parsed.other is False
