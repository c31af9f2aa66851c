from __future__ import annotations

from dataclasses import replace

import pytest

from mtppp.cluster import Cluster
from mtppp.hosts.facts import GpuFacts, HostFacts
from mtppp.phases.facts import problems

CLUSTER = Cluster.model_validate(
    {
        "name": "one",
        "model": {"id": "org/model"},
        "nodes": [{"host": "a", "address": "10.0.0.1", "gpus": 1, "gpu_type": "H100-80GB"}],
        "runtime": {"vllm": "0.32.0", "python": "/usr/bin/python3"},
    }
)


def said(gpu: GpuFacts) -> list[str]:
    facts = HostFacts.assumed("10.0.0.1", python="/usr/bin/python3", vllm="0.32.0", gpus=[gpu])
    asked = replace(facts, versions={"vllm": "0.32.0", "ray": "2.60.0", "torch": "2.13.0"})
    return list(problems(CLUSTER, [asked]))


@pytest.mark.parametrize("mebibytes", [81_559, 81_079])
def test_the_type_of_the_file_is_found_whatever_the_driver_calls_it(mebibytes: int) -> None:
    assert said(GpuFacts("NVIDIA H100 80GB HBM3", mebibytes * 2**20, "9.0")) == []


@pytest.mark.parametrize(
    ("gpu", "what"),
    [
        (GpuFacts("NVIDIA H200", 143_771 * 2**20, "9.0"), "NVIDIA H200 with 140.4 GiB"),
        (GpuFacts("NVIDIA A100", 81_920 * 2**20, "8.0"), "compute capability 8.0"),
    ],
)
def test_another_gpu_than_the_file_says_is_a_problem(gpu: GpuFacts, what: str) -> None:
    (problem,) = said(gpu)
    assert problem.startswith("a: gpu_type is H100-80GB, but the driver shows")
    assert what in problem
