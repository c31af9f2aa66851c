"""Which layers each stage holds, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError, Refused
from mtppp.hosts.facts import HostFacts
from mtppp.model.facts import ModelFacts
from mtppp.plan import flags
from mtppp.plan.costs import best_cut, partition_problem
from mtppp.plan.memory import DEFAULT_UTILISATION, Gpu, Serving
from mtppp.plan.partition import evaluate, explain, refuse_illegal
from mtppp.plan.plan import Rank
from mtppp_patches.support import Refusal

ANY_SIZE = Gpu(memory=2**50)
"""In place of a GPU whose memory is not known, or does not limit: the cut then goes by time."""

MEMORY = "memory"
"""Code of the refusal of what does not fit. It can be overridden: peak activations and CUDA graphs
are an allowance here, which the engine measures."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Layers of each stage.

    Attributes:
        why: how it came about and what vLLM's own cut would have been, one sentence each.
        refusals: why it must not be launched. The counts are then the file's, or, where no cut
            fits, those that would be best if memory were no matter.
    """

    counts: tuple[int, ...]
    why: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def stage_gpus(
    cluster: Cluster, ranks: Sequence[Rank], facts: Sequence[HostFacts]
) -> tuple[Gpu | None, ...]:
    """The smallest GPU of each stage; None where it is not known, or where there is none."""
    return tuple(
        _smallest_gpu(cluster, facts, {rank.node for rank in ranks if rank.stage == stage})
        for stage in range(cluster.parallel.pipeline)
    )


def _smallest_gpu(cluster: Cluster, facts: Sequence[HostFacts], nodes: set[int]) -> Gpu | None:
    share = flags.share(cluster.serve.args, "gpu-memory-utilization")
    if cluster.runtime.device == "cpu" or not all(facts[node].gpus for node in nodes):
        return None
    return Gpu(
        memory=min(gpu.memory for node in nodes for gpu in facts[node].gpus),
        utilisation=share or DEFAULT_UTILISATION,
    )


def choose_cut(
    cluster: Cluster, model: ModelFacts, serving: Serving, gpus: Sequence[Gpu | None]
) -> Cut:
    """The file's cut, or the best one there is. Nothing is said of a single stage.

    Raises:
        ConfigurationError: the file's is no partition of the model's layers, or `auto` cannot
            know the model's layers.
    """
    sizes = [gpu or ANY_SIZE for gpu in gpus]
    given = cluster.parallel.layer_partition
    if given != "auto":
        refusals = _illegal(given, model)
        why = _explanation(model, serving, gpus, given)
        return Cut(given, ("the file gives this cut", *why), refusals)
    if cluster.parallel.pipeline == 1:
        return Cut((model.layer_count,))
    refusals = ()
    try:
        counts = best_cut(model, serving, sizes).counts
    except Refused as refused:
        refusals = (Refusal(MEMORY, refused.message, refused.hint, overridable=True),)
        unlimited = [ANY_SIZE] * len(gpus)
        counts = best_cut(model, replace(serving, max_model_len=None), unlimited).counts
    return Cut(counts, _explanation(model, serving, gpus, counts), refusals)


def _illegal(counts: Sequence[int], model: ModelFacts) -> tuple[Refusal, ...]:
    try:
        refuse_illegal(counts, model.layer_count, model.couplings)
    except Refused as refused:
        reasons = (refused.message, *refused.details)
        return tuple(
            Refusal("illegal-cut", reason, refused.hint, overridable=False) for reason in reasons
        )
    return ()


def _explanation(
    model: ModelFacts, serving: Serving, gpus: Sequence[Gpu | None], counts: Sequence[int]
) -> tuple[str, ...]:
    sizes = [gpu or ANY_SIZE for gpu in gpus]
    try:
        problem = partition_problem(model, serving, sizes)
    except ConfigurationError as error:
        return (f"what each layer costs is not known: {error.message}",)
    return explain(problem, evaluate(problem, counts), memory_known=None not in gpus)
