"""Builders of every command that a launch starts on a node. Pure; tested by exact value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtppp.errors import ConfigurationError
from mtppp.plan.plan import RayPorts
from mtppp_patches.gate import MIDDLEWARE

# vLLM's workers ask Ray for no CPU, and its tensors do not pass through Ray's object store.
# Left alone, Ray forks an idle worker per core and reserves a third of the memory for the store.
RAY_CPUS = 2
RAY_OBJECT_STORE_BYTES = 512 * 2**20

ONE_API_SERVER = ("--api-server-count=1",)
GATE = (f"--middleware={MIDDLEWARE}",)
"""What has the API server hold requests; see `mtppp_patches.gate`."""


def ray_head(
    *, python: str, address: str, ports: RayPorts, directory: str, gpus: int, store: int | None
) -> tuple[str, ...]:
    """`ray start --head` on the first node."""
    return (
        *_ray_start(python),
        "--head",
        f"--port={ports.gcs}",
        f"--dashboard-port={ports.dashboard}",
        "--include-dashboard=false",
        f"--ray-client-server-port={ports.client_server}",
        *_ray_node(address=address, ports=ports, directory=directory, gpus=gpus, store=store),
    )


def ray_worker(
    *,
    python: str,
    address: str,
    head: str,
    ports: RayPorts,
    directory: str,
    gpus: int,
    store: int | None,
) -> tuple[str, ...]:
    """`ray start` on every other node; `head` is "address:port" of the GCS."""
    return (
        *_ray_start(python),
        f"--address={head}",
        *_ray_node(address=address, ports=ports, directory=directory, gpus=gpus, store=store),
    )


def _ray_start(python: str) -> tuple[str, ...]:
    return (python, "-m", "ray.scripts.scripts", "start")


def _ray_node(
    *, address: str, ports: RayPorts, directory: str, gpus: int, store: int | None
) -> tuple[str, ...]:
    return (
        f"--node-ip-address={address}",
        f"--node-manager-port={ports.node_manager}",
        f"--object-manager-port={ports.object_manager}",
        f"--runtime-env-agent-port={ports.runtime_env_agent}",
        f"--dashboard-agent-listen-port={ports.dashboard_agent_http}",
        f"--dashboard-agent-grpc-port={ports.dashboard_agent_grpc}",
        f"--metrics-export-port={ports.metrics_export}",
        f"--min-worker-port={ports.first_worker}",
        f"--max-worker-port={ports.last_worker}",
        f"--temp-dir={directory}",
        f"--num-gpus={gpus}",
        f"--num-cpus={RAY_CPUS}",
        f"--object-store-memory={store or RAY_OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
        # Stays in the foreground: one process to record, which ends the others when it ends.
        "--block",
    )


def placement(*, python: str, timeout: float) -> tuple[str, ...]:
    """Makes the placement group that MTPPP_ENGINE describes, within `timeout` seconds."""
    return (python, "-m", "mtppp_patches.placement", f"--timeout={timeout:g}")


def server(
    *,
    python: str,
    model: str,
    revision: str | None,
    served_name: str,
    address: str,
    port: int,
    tensor: int,
    pipeline: int,
    draft_tokens: int,
    device: str,
    gate: bool,
    args: Mapping[str, Any],
) -> tuple[str, ...]:
    """`vllm serve` on the first node.

    Args:
        gate: whether requests are held until the deployment was verified.
        args: `serve.args` of the file, flags without dashes. They come last but for those that
            decide correctness, which the schema keeps out of `args`.
    """
    speculative = (
        (
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": draft_tokens}),
        )
        if draft_tokens
        else ()
    )
    return (
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        *(("--revision", revision) if revision else ()),
        "--served-model-name",
        served_name,
        "--host",
        address,
        "--port",
        str(port),
        "--tensor-parallel-size",
        str(tensor),
        "--pipeline-parallel-size",
        str(pipeline),
        "--distributed-executor-backend",
        "ray",
        # Named, so that a platform or a feature that would turn it off is an error and not a
        # silent change: the synchronous scheduler is wrong with PP and MTP.
        "--async-scheduling",
        *speculative,
        *flags({**(_CPU_ARGS if device == "cpu" else {}), **args}),
        # After any other middleware: the last one is the outermost.
        *(GATE if gate else ()),
        # Left alone it is the data-parallel size, and each process would have a gate of its own.
        *(ONE_API_SERVER if gate and args.get("data-parallel-size") else ()),
    )


# No compiler and no CUDA graphs without a GPU; the CPU's attention wants blocks of 32 tokens.
_CPU_ARGS: Mapping[str, Any] = {"enforce-eager": True, "block-size": 32}


def flags(args: Mapping[str, Any]) -> tuple[str, ...]:
    """Command-line flags: True -> `--x`, False -> `--no-x`, a list -> `--x a b`, else `--x=value`.

    Mappings, also in a list, become JSON. None and an empty list drop a flag, so that a file can
    undo a default.

    Raises:
        ConfigurationError: an item of a list cannot be written so that vLLM reads it as a value.
    """
    return tuple(part for name, value in args.items() for part in _flag(name, value))


def _flag(name: str, value: Any) -> tuple[str, ...]:
    match value:
        case None | []:
            return ()
        case True:
            return (f"--{name}",)
        case False:
            return (f"--no-{name}",)
        case [only]:
            return (f"--{name}={_text(only)}",)
        case [*items]:
            texts = [_text(item) for item in items]
            for index, text in enumerate(texts):
                if text.startswith("-"):
                    raise ConfigurationError(
                        f"serve.args.{name}[{index}]: {text!r} begins with a dash:"
                        " in a list of several, vllm serve would take it for a flag",
                        hint="rename it, or make it the only item",
                    )
            return (f"--{name}", *texts)
        case _:
            # With "=", or a value that begins with a dash would be read as a flag.
            return (f"--{name}={_text(value)}",)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
