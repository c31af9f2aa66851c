"""A Plan with all that is to be said of it before it is carried out.

`mtppp plan` shows it; a launch refuses what it refuses. The same function, the same input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mtppp.cluster import Cluster
from mtppp.cluster.placeholders import placeholders
from mtppp.errors import ConfigurationError
from mtppp.hosts.facts import HostFacts
from mtppp.model.facts import ModelFacts
from mtppp.plan.admission import Admission, consider, refuse
from mtppp.plan.build import PLACEMENT_TIMEOUT, build_plan, engine_spec, serving
from mtppp.plan.checks import gpu_refusals, model_refusals
from mtppp.plan.cut import ANY_SIZE, MEMORY, Cut, choose_cut, stage_gpus
from mtppp.plan.defaults import Defaults, choose_defaults, with_defaults
from mtppp.plan.layout import assign_ranks
from mtppp.plan.memory import Gpu, MemoryReport, Serving, memory_report
from mtppp.plan.plan import Plan, Rank
from mtppp.plan.times import Times, node_reads
from mtppp_patches.support import Refusal


@dataclass(frozen=True, slots=True)
class Warn:
    """Something an operator should know, and what to do about it ("" for nothing)."""

    message: str
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Review:
    """A Plan, judged.

    Attributes:
        plan: what a launch would do.
        model: facts of the model.
        admission: what is known of this combination of model, release and parallelism.
        cut: which layers go where, and why.
        serving: how the model is served; `max_model_len` is what vLLM takes when the file has none.
        gpus: the smallest GPU of each stage; None where it is not known.
        gpu_names: of each stage's GPUs, as the driver or the file calls them; "" if not known.
        memory: of every stage; None when the model's sizes are not known. Where the GPU is not
            known, only what a stage takes means anything, not what is left.
        refusals: why it must not be launched, overridden ones left out.
        defaults: what is set where the file says nothing, and what is not; with the reasons.
        times: what bounds the time that a launch takes.
        warnings: what else to know.
        unknowns: what could not be established, one sentence each.
        placeholders: what the file has yet to be told, one sentence each; a launch wants it.
    """

    plan: Plan
    model: ModelFacts
    admission: Admission
    cut: Cut
    serving: Serving
    gpus: tuple[Gpu | None, ...]
    gpu_names: tuple[str, ...]
    memory: MemoryReport | None
    refusals: tuple[Refusal, ...]
    defaults: Defaults
    times: Times
    warnings: tuple[Warn, ...]
    unknowns: tuple[str, ...]
    placeholders: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """What is refused, when it is."""
        return f"{self.plan.family} on vLLM {self.plan.vllm}"

    @property
    def fullest(self) -> int | None:
        """The stage that limits the KV cache; None when what fits is not known."""
        if self.memory is None or None in self.gpus:
            return None
        return self.memory.tightest.index


def early_refusals(cluster: Cluster, model: ModelFacts) -> tuple[Refusal, ...]:
    """What can be refused before any host is asked."""
    admission = consider(engine_spec(cluster, family=model.model_type))
    return (*admission.refusals, *model_refusals(cluster, model))


def review(
    cluster: Cluster, *, model: ModelFacts, bundle: str, facts: Sequence[HostFacts]
) -> Review:
    """Plan a deployment and judge it.

    Args:
        bundle: name of the plugins' directory.
        facts: of the nodes, in the order of the file; may be assumed.

    Raises:
        ConfigurationError: the ranks do not fit on the nodes, or no layer partition can be made.
        Refused: there are more stages than the model can be cut into, so there is no Plan.
    """
    parallel = cluster.parallel
    ranks = assign_ranks(
        [node.gpus for node in cluster.nodes], tensor=parallel.tensor, pipeline=parallel.pipeline
    )
    admission = consider(engine_spec(cluster, family=model.model_type))
    refusals = [
        *admission.refusals,
        *model_refusals(cluster, model),
        *gpu_refusals(cluster, model, facts),
    ]
    defaults = choose_defaults(cluster, model, facts)
    settled = with_defaults(cluster, defaults)
    served = serving(settled)
    if _takes_native_length(cluster):
        served = replace(served, max_model_len=model.context)
    gpus = stage_gpus(settled, ranks, facts)
    try:
        cut = choose_cut(cluster, model, served, gpus)
    except ConfigurationError:
        if any(refusal.code == "pipeline-too-long" for refusal in refusals):
            refuse(f"{model.model_type} on vLLM {cluster.runtime.vllm}", refusals)
        raise
    memory, memory_unknowns = _memory(model, cut, served, gpus)
    refusals += [*cut.refusals, *_too_little_memory(cluster, cut, served, gpus, memory)]
    in_spite = [r for r in refusals if r.code == MEMORY and MEMORY in cluster.at_own_risk]
    admission = replace(admission, overridden=(*admission.overridden, *in_spite))
    plan = build_plan(
        settled,
        model=model,
        admission=admission,
        layer_partition=cut.counts,
        ranks=ranks,
        bundle=bundle,
        facts=facts,
    )
    return Review(
        plan=plan,
        model=model,
        admission=admission,
        cut=cut,
        serving=served,
        gpus=gpus,
        gpu_names=_gpu_names(ranks, facts, parallel.pipeline),
        memory=memory,
        refusals=tuple(refusal for refusal in refusals if refusal not in in_spite),
        defaults=defaults,
        times=Times(
            reads=node_reads(model, plan.stages, len(plan.nodes)),
            placement_timeout=PLACEMENT_TIMEOUT,
            stall_timeout=cluster.serve.stall_timeout,
        ),
        warnings=(
            *_warnings(cluster, model, admission, ranks, served),
            *_not_watched(cluster, plan),
            *(Warn(warning) for warning in defaults.warnings),
        ),
        unknowns=(*memory_unknowns, *_unknown_gpus(cluster, gpus), *model.unknowns),
        placeholders=placeholders(cluster),
    )


def _takes_native_length(cluster: Cluster) -> bool:
    return cluster.serve.args.get("max-model-len") is None


def _memory(
    model: ModelFacts, cut: Cut, serving: Serving, gpus: Sequence[Gpu | None]
) -> tuple[MemoryReport | None, tuple[str, ...]]:
    try:
        return memory_report(model, cut.counts, serving, [gpu or ANY_SIZE for gpu in gpus]), ()
    except ConfigurationError as error:
        return None, (error.message,)


def _too_little_memory(
    cluster: Cluster,
    cut: Cut,
    serving: Serving,
    gpus: Sequence[Gpu | None],
    memory: MemoryReport | None,
) -> Iterator[Refusal]:
    if memory is None or any(refusal.code == MEMORY for refusal in cut.refusals):
        return
    problem = memory.problem(serving.max_model_len)
    if not problem:
        return
    reason, _, way_out = problem.partition("; ")
    if "max-model-len" in reason:
        way_out = f"set max-model-len to {memory.largest_max_model_len} or less"
    yield Refusal(MEMORY, reason, way_out, overridable=True)


def _unknown_gpus(cluster: Cluster, gpus: Sequence[Gpu | None]) -> Iterator[str]:
    if cluster.runtime.device == "cuda" and None in gpus:
        yield (
            "the GPUs: whether the model fits, and how many tokens, depends on them; "
            "give gpu_type in the file, or plan with --connect"
        )


def _gpu_names(ranks: Sequence[Rank], facts: Sequence[HostFacts], stages: int) -> tuple[str, ...]:
    names = []
    for stage in range(stages):
        nodes = sorted({rank.node for rank in ranks if rank.stage == stage})
        kinds = dict.fromkeys(gpu.name for node in nodes for gpu in facts[node].gpus)
        names.append(", ".join(kinds))
    return tuple(names)


def _not_watched(cluster: Cluster, plan: Plan) -> Iterator[Warn]:
    if plan.invariants == "off" and len(plan.stages) > 1 and cluster.invariants.sample_every:
        yield Warn(
            "invariants are not watched: with data parallelism there are several engines, and they "
            "are of the ranks of one",
            "leave out data-parallel-size, or say `invariants: {sample_every: 0}`",
        )


def _warnings(
    cluster: Cluster,
    model: ModelFacts,
    admission: Admission,
    ranks: Sequence[Rank],
    serving: Serving,
) -> Iterator[Warn]:
    for refusal in admission.overridden:
        yield Warn(f"at your own risk ({refusal.code}): {refusal.reason}", refusal.way_out)
    if _takes_native_length(cluster) and serving.max_model_len:
        yield Warn(
            f"max-model-len is not set: vLLM takes the model's own {serving.max_model_len}",
            "set it to what your requests need: there must be room for one request that long",
        )
    for index, node in enumerate(cluster.nodes):
        used = sum(rank.node == index for rank in ranks)
        if used < node.gpus:
            yield Warn(
                f"{node.host}: {node.gpus - used} of its {node.gpus} GPUs would be idle",
                f"lower nodes[{index}].gpus, or raise parallel.tensor or parallel.pipeline",
            )
    for note in model.notes:
        yield Warn(f"the model's config.json: {note}")
