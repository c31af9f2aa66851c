"""Clusters to plan, without a host."""

from __future__ import annotations

from typing import Any

from mtppp.cluster import Cluster
from mtppp.hosts.facts import GpuFacts, HostFacts
from mtppp.model.config import find_config
from mtppp.model.facts import ModelFacts, read_facts
from mtppp.plan.review import Review, review

GLM = read_facts(find_config("zai-org/GLM-5.2-FP8", environ={}).values)


def cluster(**changes: Any) -> Cluster:
    """GLM-5.2 on two nodes of eight H100; `changes` replace whole sections."""
    sections: dict[str, Any] = {
        "name": "glm",
        "model": {"id": "zai-org/GLM-5.2-FP8"},
        "gpus_per_node": 8,
        "gpu_type": "H100-80GB",
        "nodes": [{"host": "a", "address": "10.0.0.1"}, {"host": "b", "address": "10.0.0.2"}],
        "runtime": {"vllm": "0.32.0", "python": "/opt/vllm/bin/python"},
        "parallel": {"tensor": 8, "pipeline": 2},
        "speculative": {"tokens": 3},
        "serve": {"args": {"max-model-len": 131072, "kv-cache-dtype": "fp8"}},
    }
    return Cluster.model_validate(sections | changes)


def assumed(described: Cluster) -> list[HostFacts]:
    return [
        HostFacts.assumed(
            node.address,
            python=described.runtime.python,
            vllm=described.runtime.vllm,
            gpus=[GpuFacts.of_type(node.gpu_type)] * node.gpus if node.gpu_type else (),
        )
        for node in described.nodes
    ]


def reviewed(model: ModelFacts = GLM, **changes: Any) -> Review:
    """The review of `cluster(**changes)` with assumed hosts."""
    described = cluster(**changes)
    return review(described, model=model, bundle="0123", facts=assumed(described))


def codes(result: Review) -> set[str]:
    """Of what is refused, but for what is not proven yet."""
    return {refusal.code for refusal in result.refusals if "proven" not in refusal.reason}
