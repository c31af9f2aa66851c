"""What mtppp sets itself, and where the file has a place for it instead."""

from __future__ import annotations

import re

MANAGED_FLAGS = {
    "api-key": "a key must not be on a command line; list VLLM_API_KEY under secrets",
    "async-scheduling": "always on, because pipeline parallelism with MTP is wrong without it",
    "config": "a second file would hide flags from mtppp; write them under serve.args",
    "distributed-executor-backend": "mtppp always runs vLLM's Ray executor",
    "grpc": "mtppp reaches the server over HTTP at serve.port",
    "grpc-port": "mtppp reaches the server over HTTP at serve.port",
    "headless": "mtppp starts every node; list them under nodes",
    "hf-token": "a token must not be on a command line; list HF_TOKEN under secrets",
    "host": "the server runs on the first node; put that node first under nodes",
    "master-addr": "mtppp starts every node; list them under nodes",
    "master-port": "mtppp starts every node; list them under nodes",
    "model": "set model.id",
    "no-async-scheduling": "pipeline parallelism with MTP is wrong without async scheduling",
    "nnodes": "mtppp starts every node; list them under nodes",
    "node-rank": "mtppp starts every node; list them under nodes",
    "pipeline-parallel-size": "set parallel.pipeline",
    "port": "set serve.port",
    "revision": "set model.revision",
    "served-model-name": "set model.served_name",
    "spec-method": "set speculative.method",
    "spec-model": "set speculative.method; the MTP layer is in the model itself",
    "spec-tokens": "set speculative.tokens",
    "speculative-config": "set speculative.method and speculative.tokens",
    "tensor-parallel-size": "set parallel.tensor",
    "uds": "mtppp reaches the server over HTTP at serve.port",
}
"""vllm serve flags, without dashes, that have no place in serve.args: what to do instead."""

_RESERVED_REASONS = {
    "PYTHONPATH": "mtppp's plugin reaches vLLM through it",
    "RAY_ADDRESS": "mtppp starts a Ray of its own",
    "RAY_AUTH_MODE": "mtppp turns token authentication on",
    "RAY_AUTH_TOKEN": "mtppp makes the token, and keeps it out of the environment",
    "RAY_AUTH_TOKEN_PATH": "mtppp makes the token",
    "SPT_NOENV": "mtppp finds its own processes by it",
    "VLLM_CONFIG_ROOT": "mtppp gives vLLM a private one",
    "VLLM_HOST_IP": "it is each node's address",
    "VLLM_PLUGINS": "it would switch mtppp's plugin off",
    "VLLM_PP_LAYER_PARTITION": "set parallel.layer_partition",
    "VLLM_RAY_BUNDLE_INDICES": "the order of nodes decides the placement",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "the older executor has no async scheduling",
    "VLLM_USE_V2_MODEL_RUNNER": "the V1 runner cannot do pipeline parallelism with MTP",
}

RESERVED_ENV = frozenset(_RESERVED_REASONS)
"""Environment variables that mtppp sets on the nodes."""

RESERVED_ENV_PREFIX = "MTPPP_"
"""Every variable that begins so is mtppp's own."""

_SECRET_NAME = re.compile(r"(?:.*_)?(?:TOKEN|API_KEY|SECRET|PASSWORD|PASSWD|SECRET_ACCESS_KEY)")


def managed_flag(flag: str) -> str | None:
    """Why `flag` (kebab-case, no dashes in front) has no place in serve.args; None when it has.

    An abbreviation counts as the flag: vLLM's parser takes any beginning that is unique.
    """
    if reason := MANAGED_FLAGS.get(flag):
        return reason
    longer = next((name for name in MANAGED_FLAGS if flag and name.startswith(flag)), None)
    return f"short for {longer}: {MANAGED_FLAGS[longer]}" if longer else None


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
