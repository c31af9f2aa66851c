"""What is in the way of a deployment before a GPU is touched: the split, the GPUs, the drafts.

Memory is checked with the cut, in `mtppp.plan.review`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtppp.cluster import Cluster
from mtppp.hosts.facts import HostFacts
from mtppp.model.drafters import parse_release
from mtppp.model.facts import ModelFacts
from mtppp.model.parallelism import (
    SPARSE_ATTENTION_FROM,
    Problem,
    draft_problems,
    gpu_problems,
    parallel_problems,
)
from mtppp.plan.flags import switch
from mtppp_patches.support import Refusal


def model_refusals(cluster: Cluster, model: ModelFacts) -> tuple[Refusal, ...]:
    """What the model itself forbids, whatever the hosts are."""
    parallel = cluster.parallel
    expert = parallel.tensor if switch(cluster.serve.args, "enable-expert-parallel") else None
    split = parallel_problems(
        model, tensor=parallel.tensor, pipeline=parallel.pipeline, expert=expert
    )
    drafts = draft_problems(model, cluster.speculative.tokens if cluster.speculative else 0)
    return tuple(
        Refusal(problem.code, problem.message, _way_out(problem, cluster, model), overridable=False)
        for problem in (*split, *drafts)
    )


def gpu_refusals(
    cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]
) -> tuple[Refusal, ...]:
    """What the model needs that the hosts' GPUs lack; GPUs that are not known pass."""
    return tuple(
        Refusal(problem.code, f"{hosts}: {problem.message}", _HOPPER, overridable=False)
        for problem, hosts in _gpu_problems(cluster, model, facts)
    )


def _gpu_problems(
    cluster: Cluster, model: ModelFacts, facts: Sequence[HostFacts]
) -> Iterator[tuple[Problem, str]]:
    lacking: dict[Problem, list[str]] = {}
    for node, fact in zip(cluster.nodes, facts, strict=True):
        for capability in {gpu.compute_capability for gpu in fact.gpus}:
            version = parse_release(capability)
            if version is None:
                continue
            for problem in gpu_problems(model, version[:2]):
                lacking.setdefault(problem, []).append(node.host)
    for problem, hosts in lacking.items():
        yield problem, ", ".join(hosts)


_HOPPER = "use GPUs of compute capability {}.{} or newer".format(*SPARSE_ATTENTION_FROM)


def _way_out(problem: Problem, cluster: Cluster, model: ModelFacts) -> str:
    match problem.code:
        case "experts":
            return "remove enable-expert-parallel, or lower parallel.tensor"
        case "pipeline-too-long":
            return "lower parallel.pipeline"
        case "no-mtp-layer":
            return "remove speculative"
        case "drafts-not-a-multiple":
            return f"draft a multiple of {model.mtp_layers}"
        case _:
            return _other_tensor_sizes(cluster, model)


def _other_tensor_sizes(cluster: Cluster, model: ModelFacts) -> str:
    """The tensor sizes that this model can be split over on these nodes."""
    gpus = [node.gpus for node in cluster.nodes]
    most = sum(gpus) if cluster.parallel.pipeline == 1 else min(gpus)
    possible = [size for size in range(1, most + 1) if not parallel_problems(model, tensor=size)]
    return f"parallel.tensor can be {', '.join(map(str, possible))}"
