"""Flags, variables and secrets that the file must not set, and what each is told."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from mtppp.cluster import Model, Parallel, Serve, Speculative
from mtppp.cluster.managed import (
    MANAGED_FLAGS,
    RESERVED_ENV,
    env_problems,
    flag_problems,
    secret_problems,
)
from mtppp.plan.environment import node_environment

SECTIONS: dict[str, type[BaseModel]] = {
    "model": Model,
    "parallel": Parallel,
    "serve": Serve,
    "speculative": Speculative,
}
SYNC = "pipeline parallelism with MTP is wrong without async scheduling"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            ["max-model-len", "kv_cache_dtype", "O", "seed"],
            [("O", "not a flag: lower-case letters, digits and dashes only")],
        ),
        (["tensor-parallel-size"], [("tensor-parallel-size", "set parallel.tensor")]),
        (["pipeline_parallel_size"], [("pipeline_parallel_size", "set parallel.pipeline")]),
        (["no-async-scheduling"], [("no-async-scheduling", SYNC)]),
        (
            ["async_scheduling"],
            [
                (
                    "async_scheduling",
                    "always on, because pipeline parallelism with MTP is wrong without it",
                )
            ],
        ),
        # What mtppp itself asks the server for.
        (
            ["ssl-certfile", "skip_tokenizer_init", "api-server-count"],
            [
                (
                    "ssl-certfile",
                    "mtppp speaks plain HTTP to the server at serve.port; put a proxy with TLS in "
                    "front of it",
                ),
                (
                    "skip_tokenizer_init",
                    "mtppp asks the server for text, which takes a tokenizer; leave it out",
                ),
                (
                    "api-server-count",
                    "with several, mtppp's counters are missing from /metrics; leave it out",
                ),
            ],
        ),
        # vLLM's parser completes what is unique.
        (["tensor-par"], [("tensor-par", "short for tensor-parallel-size: set parallel.tensor")]),
        (["no_async"], [("no_async", f"short for no-async-scheduling: {SYNC}")]),
        (
            ["enable-expert"],
            [("enable-expert", "short for enable-expert-parallel; write it in full")],
        ),
        (["enable-expert-parallel", "enable-eplb", "data-parallel-size"], []),
        # ... and takes a mapping apart.
        (
            ["speculative_config.method", "spec.x"],
            [
                ("speculative_config.method", "set speculative.method and speculative.tokens"),
                ("spec.x", "short for spec-method: set speculative.method"),
            ],
        ),
        (
            ["compilation-config.mode"],
            [
                (
                    "compilation-config.mode",
                    "written as a mapping; write compilation-config: {mode: ...}",
                )
            ],
        ),
        (
            ["no-enable-prefix-caching"],
            [
                (
                    "no-enable-prefix-caching",
                    "a flag is switched off by its value; write enable-prefix-caching: false",
                )
            ],
        ),
        (
            ["--dtype", "-q"],
            [
                ("--dtype", "flags are written without dashes in front; write dtype"),
                ("-q", "flags are written without dashes in front; write q"),
            ],
        ),
        (
            ["max-model-len", "max_model_len", "max_model-len"],
            [
                ("max_model_len", "the same flag as max-model-len; remove one of the two"),
                ("max_model-len", "the same flag as max-model-len; remove one of the two"),
            ],
        ),
        (
            ["dtype=float16", "Dtype", "a b", ""],
            [
                (key, "not a flag: lower-case letters, digits and dashes only")
                for key in ("dtype=float16", "Dtype", "a b", "")
            ],
        ),
    ],
)
def test_flags(keys: list[str], expected: list[tuple[str, str]]) -> None:
    assert [(problem.path[0], problem.message) for problem in flag_problems(keys)] == expected


@pytest.mark.parametrize("flag", MANAGED_FLAGS)
def test_a_managed_flag_is_refused_however_it_is_written(flag: str) -> None:
    for written in (flag, flag.replace("-", "_"), flag[:-1], f"{flag}.x", f"{flag}.x+"):
        assert list(flag_problems([written])), written


def test_keys_named_in_advice_exist() -> None:
    places = {
        place for reason in MANAGED_FLAGS.values() for place in re.findall(r"\w+\.\w+", reason)
    }
    assert places  # the advice names places at all
    for place in places:
        section, key = place.split(".")
        assert key in SECTIONS[section].model_fields, place


def test_env() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "LEVEL": 3,
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "10.0.0.1",
        "MTPPP_ANYTHING": "1",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    assert [(problem.path[0], problem.message) for problem in env_problems(env)] == [
        ("VLLM_HOST_IP", "must not be set here: it is each node's address"),
        ("MTPPP_ANYTHING", "must not be set here: names that begin with MTPPP_ are mtppp's own"),
        ("HF_TOKEN", "a secret must not be in the file; list its name under secrets"),
        ("AWS_SECRET_ACCESS_KEY", "a secret must not be in the file; list its name under secrets"),
    ]


def test_what_the_plan_sets_is_reserved() -> None:
    planned = node_environment(
        deployment="x",
        directory="/d",
        plugins="/p",
        python="/python",
        path="/bin",
        address="10.0.0.1",
        interface="eth0",
        device="cuda",
        engine="{}",
        layer_partition=(3, 3),
        ranks=2,
        user={},
    )
    assert {name for name in planned if not name.startswith("MTPPP_")} <= RESERVED_ENV


def test_secrets_are_names_and_never_shown() -> None:
    names = ["HF_TOKEN", "HF_TOKEN=hf_abc", 5, "hf-abc", "HF_TOKEN", "RAY_AUTH_TOKEN"]
    assert [(problem.path[0], problem.message) for problem in secret_problems(names)] == [
        (1, "must be the name of an environment variable, never its value"),
        (2, "must be the name of an environment variable, never its value"),
        (3, "must be the name of an environment variable, never its value"),
        (4, "HF_TOKEN is listed twice; remove one of the two"),
        (
            5,
            "RAY_AUTH_TOKEN must not be passed on: mtppp makes the token, and keeps it out of the "
            "environment",
        ),
    ]


def test_through_the_file(
    problems: Callable[[str], list[str]], cluster_text: Callable[..., str]
) -> None:
    text = cluster_text(
        "serve:",
        "  args:",
        "    max-model-len: 5",
        "    max_model_len: 5",
        "    api-key: sk-123",
        "secrets: [hf_abc-def, PLAIN, PLAIN]",
        runtime='runtime: {vllm: "0.32.0", python: /p, env: {PATH: /bin, PLAIN: x}}',
    )
    assert problems(text) == [
        "cluster.yaml:4: runtime.env.PATH: must not be set here: it begins with the directory of "
        "runtime.python",
        "cluster.yaml:8: serve.args.max_model_len: the same flag as max-model-len; "
        "remove one of the two",
        "cluster.yaml:9: serve.args.api-key: a key must not be on a command line; "
        "list VLLM_API_KEY under secrets",
        "cluster.yaml:10: secrets[0]: must be the name of an environment variable, never its value",
        "cluster.yaml:10: secrets[2]: PLAIN is listed twice; remove one of the two",
    ]


def test_a_variable_is_either_secret_or_not(
    problems: Callable[[str], list[str]], cluster_text: Callable[..., str]
) -> None:
    runtime = 'runtime: {vllm: "0.32.0", python: /p, env: {PLAIN: x}}'
    assert problems(cluster_text("secrets: [PLAIN]", runtime=runtime)) == [
        "cluster.yaml:4: runtime.env.PLAIN: is also under secrets; remove one of the two"
    ]


def test_flags_are_kept_in_kebab_case_and_in_order() -> None:
    serve = Serve.model_validate({"args": {"kv_cache_dtype": "fp8", "max-model-len": 1}})
    assert list(serve.args.items()) == [("kv-cache-dtype", "fp8"), ("max-model-len", 1)]
