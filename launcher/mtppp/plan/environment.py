"""The environment of the processes on a node.

A raylet hands its environment to the workers it forks, and vLLM's driver sends its own on with
`setdefault`: what a node has of its own is kept. So each node's `ray start` gets that node's
environment, and the server gets the first node's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

# Present on each node with that node's own value. vLLM's driver must not send its values on; it
# reads this list from a file below VLLM_CONFIG_ROOT.
NOT_CARRIED_OVER = (
    "GLOO_SOCKET_IFNAME",
    "MTPPP_RUN_DIR",
    "NCCL_SOCKET_IFNAME",
    "PATH",
    "PYTHONPATH",
    "RAY_AUTH_TOKEN_PATH",
    "VLLM_CONFIG_ROOT",
)

# Given a value of their own by vLLM or Ray in a worker, whatever was planned: its GPUs, its
# compiler's caches, libraries in front of those of the file. The file may name them, and a rank is
# right with another value.
REWRITTEN = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_NO_CACHE",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TRITON_CACHE_DIR",
        "UCX_RCACHE_MAX_UNRELEASED",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)

TOKEN_FILE = "ray-token"  # noqa: S105 - a file name
CONFIG_ROOT = "vllm-config"

CPU_HOST = {
    # Asks mtppp_cpu to load; it refuses where there is a GPU.
    "MTPPP_DEVICE": "cpu",
    # The V2 runner's kernels are Triton's: without a GPU they are interpreted, and compiling the
    # model around them cannot work.
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # The CPU worker takes a share of the machine's memory otherwise, once per rank.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Ranks that share a machine would each be bound to all of its cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Variables of every process on a host without a GPU."""


def node_environment(
    *,
    deployment: str,
    directory: str,
    plugins: str,
    python: str,
    path: str,
    address: str,
    interface: str,
    device: str,
    engine: str,
    layer_partition: tuple[int, ...],
    ranks: int,
    user: Mapping[str, str],
) -> dict[str, str]:
    """All variables that mtppp sets for the processes of one node.

    Args:
        path: PATH of a login there; the environment's own programs come before it.
        interface: the network interface that holds `address`.
        engine: what the plugin is told of the deployment, as JSON.
        layer_partition: layers per stage; () where vLLM has one stage.
        user: `runtime.env` of the file; may not name what is set here (the schema refuses it),
            but may override the choices made for CPU hosts.
    """
    planned = {
        "MTPPP_DEPLOYMENT": deployment,
        "MTPPP_RUN_DIR": directory,
        "MTPPP_ENGINE": engine,
        "PYTHONPATH": plugins,
        "PATH": f"{PurePosixPath(python).parent}:{path}",
        # Ray and vLLM retitle their processes, which overwrites the environment that
        # /proc/PID/environ shows, and with it the mark by which `stop` knows them.
        "SPT_NOENV": "1",
        # Addresses: what Ray registers, what vLLM advertises and what Gloo and NCCL bind must be
        # the same network, or ranks wait for each other for ever.
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{directory}/{TOKEN_FILE}",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A cold start of Ray's processes from a network file system takes longer than the 10 s
        # and 30 s that it allows itself.
        "RAY_raylet_start_wait_time_s": "120",
        # Seconds that a node that joins waits for the head's to be registered, 20 otherwise.
        "RAY_NUM_REDIS_GET_RETRIES": "120",
        # A raylet ends itself when the agent beside it has not registered after 30 s.
        "RAY_agent_register_timeout_ms": "120000",
        # Ray starts its workers, which here are the engine's, with niceness 15.
        "RAY_worker_niceness": "0",
        "VLLM_CONFIG_ROOT": f"{directory}/{CONFIG_ROOT}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_RAY_BUNDLE_INDICES": ",".join(str(rank) for rank in range(ranks)),
    }
    if layer_partition:
        planned["VLLM_PP_LAYER_PARTITION"] = ",".join(str(n) for n in layer_partition)
    chosen = {**CPU_HOST, **user} if device == "cpu" else dict(user)
    return {**chosen, **planned}


def effective(planned: Mapping[str, str]) -> dict[str, str]:
    """Of a node's variables, those that each of its ranks must have as planned."""
    # vLLM puts the network device beside each rank's GPU in front of the values of these.
    by_rank = {
        entry.partition(":")[0].strip()
        for entry in planned.get("VLLM_NIC_SELECTION_VARS", "").split(",")
    }
    return {k: v for k, v in planned.items() if k not in REWRITTEN and k not in by_rank}
