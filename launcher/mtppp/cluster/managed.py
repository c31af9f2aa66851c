"""Flags and variables: what mtppp sets itself, and where the file has a place for it instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from mtppp.cluster.source import Problem, describe

_TLS = "mtppp speaks plain HTTP to the server at serve.port; put a proxy with TLS in front of it"
_TEXT = "mtppp asks the server for text, which takes a tokenizer; leave it out"

MANAGED_FLAGS = {
    "api-key": "a key must not be on a command line; list VLLM_API_KEY under secrets",
    "api-server-count": "with several, mtppp's counters are missing from /metrics; leave it out",
    "async-scheduling": "always on, because pipeline parallelism with MTP is wrong without it",
    "config": "a second file would hide flags from mtppp; write them under serve.args",
    "disable-log-stats": "mtppp reads on /metrics that drafts are made; leave it out",
    "distributed-executor-backend": "mtppp always runs vLLM's Ray executor",
    "enable-ssl-refresh": _TLS,
    "grpc": "mtppp reaches the server over HTTP at serve.port",
    "grpc-port": "mtppp reaches the server over HTTP at serve.port",
    "headless": "mtppp starts every node; list them under nodes",
    "hf-token": "a token must not be on a command line; list HF_TOKEN under secrets",
    "host": "the server runs on the first node; put that node first under nodes",
    "master-addr": "mtppp starts every node; list them under nodes",
    "master-port": "mtppp starts every node; list them under nodes",
    "model": "set model.id",
    "nnodes": "mtppp starts every node; list them under nodes",
    "no-async-scheduling": "pipeline parallelism with MTP is wrong without async scheduling",
    "node-rank": "mtppp starts every node; list them under nodes",
    "pipeline-parallel-size": "set parallel.pipeline",
    "port": "set serve.port",
    "revision": "set model.revision",
    "served-model-name": "set model.served_name",
    "skip-tokenizer-init": _TEXT,
    "spec-method": "set speculative.method",
    "spec-model": "set speculative.method; the MTP layer is in the model itself",
    "spec-tokens": "set speculative.tokens",
    "speculative-config": "set speculative.method and speculative.tokens",
    "ssl-ca-certs": _TLS,
    "ssl-cert-reqs": _TLS,
    "ssl-certfile": _TLS,
    "ssl-ciphers": _TLS,
    "ssl-keyfile": _TLS,
    "tensor-parallel-size": "set parallel.tensor",
    "tokens-only": _TEXT,
    "uds": "mtppp reaches the server over HTTP at serve.port",
}
"""vllm serve flags, without dashes, that have no place in serve.args: what to do instead."""

READ_FLAGS = frozenset(
    {
        "data-parallel-size",
        "decode-context-parallel-size",
        "enable-eplb",
        "enable-expert-parallel",
        "hf-overrides",
        "model-class-overrides",
        "model-impl",
        "prefill-context-parallel-size",
    }
)
"""Flags that may be given and that decide whether the deployment is right: no abbreviations."""

_RESERVED_REASONS = {
    "GLOO_SOCKET_IFNAME": "it is the interface that has the node's address",
    "NCCL_SOCKET_IFNAME": "it is the interface that has the node's address",
    "PATH": "it begins with the directory of runtime.python",
    "PYTHONPATH": "mtppp's plugin reaches vLLM through it",
    "RAY_ADDRESS": "mtppp starts a Ray of its own",
    "RAY_AUTH_MODE": "mtppp turns token authentication on",
    "RAY_AUTH_TOKEN": "mtppp makes the token, and keeps it out of the environment",
    "RAY_AUTH_TOKEN_PATH": "mtppp makes the token",
    "RAY_USAGE_STATS_ENABLED": "mtppp switches usage reports off",
    "RAY_agent_register_timeout_ms": "mtppp sets it to what a cold start takes",
    "RAY_raylet_start_wait_time_s": "mtppp sets it to what a cold start takes",
    "RAY_NUM_REDIS_GET_RETRIES": "mtppp sets it to what a cold start takes",
    "RAY_worker_niceness": "the engine's workers run at normal priority",
    "SPT_NOENV": "mtppp finds its own processes by it",
    "VLLM_CONFIG_ROOT": "mtppp gives vLLM a private one",
    "VLLM_HOST_IP": "it is each node's address",
    "VLLM_NO_USAGE_STATS": "mtppp switches usage reports off",
    "VLLM_PLUGINS": "it would switch mtppp's plugin off",
    "VLLM_PP_LAYER_PARTITION": "set parallel.layer_partition",
    "VLLM_RAY_BUNDLE_INDICES": "the order of nodes decides the placement",
    "VLLM_USE_RUST_FRONTEND": "it knows no middleware, and what holds requests is one",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "the older executor has no async scheduling",
    "VLLM_USE_V2_MODEL_RUNNER": "the V1 runner cannot do pipeline parallelism with MTP",
}

RESERVED_ENV = frozenset(_RESERVED_REASONS)
"""Environment variables that mtppp sets on the nodes."""

RESERVED_ENV_PREFIX = "MTPPP_"
"""Every variable that begins so is mtppp's own."""

_FLAG = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(?:.*_)?(?:TOKEN|API_KEY|SECRET|PASSWORD|PASSWD|SECRET_ACCESS_KEY)")


def reserved_variables() -> Mapping[str, str]:
    """The variables of `RESERVED_ENV`, and why the file may not set them."""
    return _RESERVED_REASONS


def flag_problems(keys: Sequence[str]) -> Iterator[Problem]:
    """What is wrong with the keys of serve.args."""
    seen: dict[str, str] = {}
    for key in keys:
        flag = key.replace("_", "-")
        if problem := _flag_problem(flag):
            yield Problem((key,), problem)
        elif flag in seen:
            yield Problem((key,), f"the same flag as {seen[flag]}; remove one of the two")
        seen.setdefault(flag, key)


def _flag_problem(flag: str) -> str | None:
    name, dot, inner = flag.partition(".")
    if reason := _managed_flag(name):
        return reason
    if flag.startswith("no-"):
        return f"a flag is switched off by its value; write {flag.removeprefix('no-')}: false"
    if flag.startswith("-"):
        return f"flags are written without dashes in front; write {flag.lstrip('-')}"
    if dot:
        return f"written as a mapping; write {name}: {{{inner}: ...}}"
    if not _FLAG.fullmatch(flag):
        return "not a flag: lower-case letters, digits and dashes only"
    return None


def env_problems(env: Mapping[str, object]) -> Iterator[Problem]:
    """What is wrong with runtime.env."""
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            yield Problem((name,), "not a variable name: letters, digits and _ only")
        elif reason := reserved_env(name):
            yield Problem((name,), f"must not be set here: {reason}")
        elif looks_secret(name):
            yield Problem((name,), "a secret must not be in the file; list its name under secrets")
        elif isinstance(value, bool | float):
            # As text there is more than one way to write it, and programs differ: True, true, 1.
            yield Problem((name,), "must be text; write it in quotes, exactly as vLLM is to see it")
        elif not isinstance(value, str | int):
            yield Problem((name,), f"must be text; is {describe(value)}")


def secret_problems(names: Sequence[object]) -> Iterator[Problem]:
    """What is wrong with the items of secrets."""
    seen: set[str] = set()
    for i, name in enumerate(names):
        # Not shown: it may be the secret itself.
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            yield Problem((i,), "must be the name of an environment variable, never its value")
        elif reason := reserved_env(name):
            yield Problem((i,), f"{name} must not be passed on: {reason}")
        elif name in seen:
            yield Problem((i,), f"{name} is listed twice; remove one of the two")
        else:
            seen.add(name)


def _managed_flag(flag: str) -> str | None:
    """Why `flag` (kebab-case, no dashes in front) has no place in serve.args; None when it has.

    An abbreviation counts as the flag: vLLM's parser takes any beginning that is unique.
    """
    if reason := MANAGED_FLAGS.get(flag):
        return reason
    if not flag or flag in READ_FLAGS:
        return None
    for name, reason in MANAGED_FLAGS.items():
        if name.startswith(flag):
            return f"short for {name}: {reason}"
    for name in sorted(READ_FLAGS):
        if name.startswith(flag):
            return f"short for {name}; write it in full"
    return None


def reserved_env(name: str) -> str | None:
    """Why the variable must not be set for a node; None when it may be."""
    if reason := _RESERVED_REASONS.get(name):
        return reason
    if name.startswith(RESERVED_ENV_PREFIX):
        return "names that begin with MTPPP_ are mtppp's own"
    return None


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, as far as a name can tell."""
    return _SECRET_NAME.fullmatch(name) is not None
