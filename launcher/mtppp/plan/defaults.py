"""What mtppp sets where the file says nothing, each with its reason; and what it does not set.

vLLM's own defaults are for one node and a model that fits on it. Every candidate is judged here
against the facts of hosts, model and file. One that cannot be justified from those is not set, and
says why: a setting nobody can explain is a fault waiting to be copied.

Not here, because they follow from the file and are no choice: the interfaces for Gloo and NCCL,
`VLLM_HOST_IP`, the V2 runner, asynchronous scheduling, the layer partition (`environment`,
`commands`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtppp.cluster import Cluster
from mtppp.hosts.facts import HostFacts
from mtppp.model.facts import ModelFacts
from mtppp.plan.fabric import fabric_warnings, infiniband
from mtppp.plan.memory import DEFAULT_UTILISATION, Serving
from mtppp.plan.settings import Setting, Withheld

READY_TIMEOUT = 3600
EXECUTE_TIMEOUT = 900
GRAPH_TOKENS = 512
"""Tokens of a step up to which vLLM captures CUDA graphs."""
MINIMUM_SHM = 32 * 2**30
_HOPPER = "9.0"
_FAST_DRAFTS = (1, 3)


@dataclass(frozen=True)
class Defaults:
    """The candidates, judged.

    Attributes:
        env: for every node.
        args: for the server.
        warnings: what on the hosts or in the file will hurt, and is not for mtppp to change.
    """

    env: tuple[Setting, ...] = ()
    args: tuple[Setting, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    warnings: tuple[str, ...] = ()

    def env_values(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.env}

    def arg_values(self) -> dict[str, Any]:
        return {setting.name: setting.value for setting in self.args}


_Judged = Setting | Withheld | None
_Judge = Callable[[Cluster, ModelFacts, Sequence[HostFacts]], _Judged]


def choose_defaults(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> Defaults:
    """The settings for this deployment that its file leaves open.

    Args:
        facts: of the nodes, in the order of the file.
    """
    if cluster.runtime.device == "cpu":
        return Defaults()
    env = [judge(cluster, model, facts) for judge in _ENV]
    args = [judge(cluster, model, facts) for judge in _ARGS]
    set_env, set_args = cluster.runtime.env, cluster.serve.args
    return Defaults(
        env=tuple(s for s in env if isinstance(s, Setting) and s.name not in set_env),
        args=tuple(s for s in args if isinstance(s, Setting) and s.name not in set_args),
        withheld=tuple(
            s
            for s in (*env, *args, *_NEVER)
            if isinstance(s, Withheld) and s.name not in set_env and s.name not in set_args
        ),
        warnings=tuple(_warnings(cluster, model, facts)),
    )


def with_defaults(cluster: Cluster, defaults: Defaults) -> Cluster:
    """The cluster as it will run: what the file says, and beneath it what was chosen here."""
    args = {**defaults.arg_values(), **cluster.serve.args}
    env = {**defaults.env_values(), **cluster.runtime.env}
    return cluster.model_copy(
        update={
            "serve": cluster.serve.model_copy(update={"args": args}),
            "runtime": cluster.runtime.model_copy(update={"env": env}),
        }
    )


# ---- environment -----------------------------------------------------------------------------


def _ready_timeout(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    return Setting(
        "VLLM_ENGINE_READY_TIMEOUT_S",
        str(READY_TIMEOUT),
        "vLLM's own 600 s are too short to load hundreds of GB, and when they have passed the "
        "server ends while its engine keeps running (vllm#32116, #48031)",
    )


def _execute_timeout(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    if _ranks(cluster) == 1:
        return None
    return Setting(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        str(EXECUTE_TIMEOUT),
        "vLLM gives a step 300 s, and kernels that are compiled on first use can take longer: the "
        "engine is killed at the first request (vllm#48752)",
    )


def _block_gemm(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    name = "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
    if model.quantisation.method != "fp8" or model.quantisation.block is None:
        return None
    capabilities = _capabilities(facts)
    if not capabilities:
        return Withheld(
            name, "it matters on Hopper GPUs, and which GPUs there are is not known", "gpus"
        )
    if _HOPPER not in capabilities or _ranks(cluster) == 1:
        return None
    return Setting(
        name,
        "0",
        "on Hopper every rank of a node compiles the same block-FP8 kernel at once into one cache, "
        "without a lock, and start-up can die of it (vllm#49165); DeepGEMM serves instead",
    )


def _infiniband(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    return infiniband(cluster, facts)


def _fused_all_reduce(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    if min(cluster.parallel.tensor, cluster.parallel.pipeline) == 1:
        return None
    return Withheld(
        "compilation-config",
        "pass_config.fuse_allreduce_rms deadlocked at start with TP and PP: vLLM 0.23 leaves the "
        "pass out under PP, and from 0.24 on its workspace is made over the TP group, which is the "
        "mend. GLM-5.2's own layers do not heed the flag from 0.29 on",
    )


# ---- flags -----------------------------------------------------------------------------------


def _utilisation(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    return Setting(
        "gpu-memory-utilization",
        DEFAULT_UTILISATION,
        "what the memory of the Plan is calculated with; vLLM's own 0.92 leaves less for prompts "
        "scored with prompt_logprobs",
    )


def _batched_tokens(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    return Setting(
        "max-num-batched-tokens",
        Serving(tensor=1).max_num_batched_tokens,
        "vLLM chooses by the GPU's memory, 2048 to 16384; fixed: the Plan's memory and where long "
        "prompts are cut depend on it",
    )


def _sequences(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    drafts = cluster.speculative.tokens if cluster.speculative else 0
    count = min(Serving(tensor=1).max_num_seqs, GRAPH_TOKENS // (drafts + 1))
    return Setting(
        "max-num-seqs",
        count,
        "vLLM's own 1024 is not meant for a model of several nodes; CUDA graphs end at "
        f"{GRAPH_TOKENS} tokens a step, within which are {count} requests of 1 + {drafts} tokens",
    )


def _prefix_caching(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> _Judged:
    name = "enable-prefix-caching"
    if model.stack is None:
        return Withheld(
            name, f"left to vLLM: what layers {model.model_type} has is not known", "the family"
        )
    if any(layer.attention == "linear" for layer in model.stack.layers):
        return Withheld(name, "left to vLLM: the model has recurrent layers, which cache otherwise")
    return Setting(
        name, True, "vLLM's own choice for this model, written down so that no release changes it"
    )


_ENV: tuple[_Judge, ...] = (_ready_timeout, _execute_timeout, _block_gemm, _infiniband)
_ARGS: tuple[_Judge, ...] = (
    _utilisation,
    _batched_tokens,
    _sequences,
    _prefix_caching,
    _fused_all_reduce,
)

_NEVER = (
    Withheld(
        "enable-expert-parallel",
        "with one engine it saves no memory, and with data parallelism beside PP its outputs are "
        "wrong: off unless the file says otherwise",
    ),
    Withheld(
        "ulimits",
        "open files and locked memory are raised as far as a node allows, and a warning says where "
        "that is too little for RDMA (vllm#42075); for a larger stack no reason was found",
    ),
    Withheld(
        "NCCL transport",
        "no setting makes NCCL fail rather than fall back to sockets in every version; what it "
        "chose stands in the server's log (NET/IB or NET/Socket)",
    ),
)


def _ranks(cluster: Cluster) -> int:
    return cluster.parallel.tensor * cluster.parallel.pipeline


def _capabilities(facts: Sequence[HostFacts]) -> set[str]:
    return {gpu.compute_capability for host in facts for gpu in host.gpus}


def _warnings(cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]) -> list[str]:
    warnings = [
        f"{node.host}: /dev/shm has {host.shm_bytes / 2**30:.0f} GiB; below "
        f"{MINIMUM_SHM // 2**30} GiB NCCL and vLLM may run out of it"
        for node, host in zip(cluster.nodes, facts, strict=True)
        # 0: nobody asked the host.
        if 0 < host.shm_bytes < MINIMUM_SHM and node.gpus > 1
    ]
    warnings += fabric_warnings(cluster, facts)
    drafts = cluster.speculative.tokens if cluster.speculative else 0
    if model.sparse and drafts and drafts not in _FAST_DRAFTS and _HOPPER in _capabilities(facts):
        warnings.append(
            f"speculative.tokens is {drafts}: on Hopper the sparse indexer has a fast path for 1 "
            f"and 3 only, and reads the KV cache {drafts + 1} times a step (vllm#52164)"
        )
    return warnings
