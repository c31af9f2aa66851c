from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mtppp.plan.differences import differences

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clusters import reviewed

RUNNING = reviewed().plan.fields()


def said(**changes: Any) -> list[str]:
    return [
        str(difference) for difference in differences(RUNNING, reviewed(**changes).plan.fields())
    ]


def test_the_same_plan_does_not_differ() -> None:
    assert said() == []


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"serve": {"args": {"max-model-len": 65536, "enforce-eager": True}}},
            [
                "vllm serve --enforce-eager: on would be new",
                "vllm serve --kv-cache-dtype: fp8 would be gone",
                "vllm serve --max-model-len: 131072 runs, 65536 is planned",
            ],
        ),
        (
            {"parallel": {"tensor": 8, "pipeline": 2, "layer_partition": [38, 40]}},
            ["layers of each stage: 42/36 runs, 38/40 is planned"],
        ),
        (
            {"speculative": {"tokens": 1}},
            ["draft tokens per step: 3 runs, 1 is planned"],
        ),
        (
            {"serve": {"port": 8001, "args": {"max-model-len": 131072, "kv-cache-dtype": "fp8"}}},
            ["address of the server: http://10.0.0.1:8000 runs, http://10.0.0.1:8001 is planned"],
        ),
        (
            {
                "runtime": {
                    "vllm": "0.32.0",
                    "python": "/opt/vllm/bin/python",
                    "env": {"NCCL_DEBUG": "INFO"},
                }
            },
            ["every node: NCCL_DEBUG: INFO would be new"],
        ),
        (
            {"nodes": [{"host": "a", "address": "10.0.0.1"}, {"host": "c", "address": "10.0.0.3"}]},
            [
                "stage 1: on b runs, on c is planned",
                "node: c would be new",
                "node: b would be gone",
            ],
        ),
    ],
)
def test_what_changes_is_said_once_and_what_follows_from_it_is_not(
    changes: dict[str, Any], lines: list[str]
) -> None:
    assert said(**changes) == lines


def test_what_differs_on_one_node_is_said_of_that_node() -> None:
    running = reviewed().plan.fields()
    running["nodes"][1]["ray"]["env"]["GLOO_SOCKET_IFNAME"] = "eth7"
    found = differences(running, RUNNING)
    assert [str(difference) for difference in found] == [
        "b: GLOO_SOCKET_IFNAME: eth7 runs, <interface of 10.0.0.2> is planned"
    ]


def test_a_plan_of_another_version_differs_even_where_no_words_are_known_for_it() -> None:
    assert differences({**RUNNING, "new_field": 1}, RUNNING)
    assert differences({"name": "glm"}, RUNNING)
