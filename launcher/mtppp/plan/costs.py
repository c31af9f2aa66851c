"""What layers cost a stage in time and memory: the numbers `mtppp.plan.partition` cuts by.

Time is counted in bytes that a GPU reads from its memory in one step, because reading is what
bounds decoding: weights once per step, of the routed experts those that the step's tokens choose
(expected value, tokens choosing independently and evenly), and the KV cache of the requests. The
communication within a layer is left out, being nearly the same for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mtppp.errors import Refused
from mtppp.model.cache import HeadCache, LatentCache, StateCache
from mtppp.model.facts import ModelFacts
from mtppp.model.layers import Layer
from mtppp.model.weights import Split
from mtppp.plan.memory import (
    Gpu,
    Serving,
    drafter_extras,
    index_workspace,
    known_stack,
    layer_bytes,
    longest_context,
    prefill_workspace,
    rank_bytes,
    rotary_table,
    unpacked_row,
)
from mtppp.plan.partition import (
    UNLIMITED,
    Cost,
    Partition,
    Problem,
    StageHost,
    best_partition,
    most_tokens,
)


@dataclass(frozen=True)
class Workload:
    """The step to balance the stages for.

    Attributes:
        requests: in one microbatch.
        context: tokens each has.
    """

    requests: int = 16
    context: int = 8192


def partition_problem(
    facts: ModelFacts,
    serving: Serving,
    gpus: Sequence[Gpu],
    *,
    workload: Workload | None = None,
    slowness: Sequence[int] | None = None,
) -> Problem:
    """The problem of cutting this model over these stages.

    The KV cache must hold one request of `serving.max_model_len`, if that is given.

    Args:
        gpus: the smallest GPU of each stage.
        slowness: factor on each stage's time; None: all alike.

    Raises:
        ConfigurationError: the model's layers or sizes are not known.
    """
    stack = known_stack(facts)
    work = workload or Workload()
    verified = work.requests * (serving.drafts + 1)
    alone = len(gpus) == 1
    first = Cost(memory=rank_bytes(facts, stack.embedding, serving.ranks))
    head = rank_bytes(facts, stack.head, serving.ranks)
    last = Cost(
        # The head is read once to verify and once for each draft.
        time=head * (1 + serving.drafts) + _drafting(facts, stack.mtp, serving, work),
        memory=(0 if facts.tied and alone else head)
        + rank_bytes(facts, stack.norm, serving.ranks)
        + sum(part.bytes for part in drafter_extras(facts, stack, serving, alone=alone)),
        cache=sum(_per_token(facts, layer, serving) for layer in stack.mtp)
        if serving.drafts
        else 0,
    )
    drafter = stack.mtp if serving.drafts else ()
    last += Cost(memory=sum(_per_request(facts, layer, serving) for layer in drafter))
    last += Cost(memory=_own_workspace(facts, drafter, serving))
    return Problem(
        layers=tuple(
            Cost(
                time=_read(facts, layer, serving, tokens=verified, work=work),
                memory=layer_bytes(facts, layer, serving.ranks)
                + _per_request(facts, layer, serving)
                + _own_workspace(facts, (layer,), serving),
                cache=_per_token(facts, layer, serving),
            )
            for layer in stack.layers
        ),
        hosts=tuple(
            # What every stage has, whatever its layers, is taken off its memory.
            StageHost(
                gpu.budget
                - index_workspace(facts, (), serving)
                - rotary_table(facts)
                - prefill_workspace(facts, serving),
                slowness[stage] if slowness is not None else 1,
            )
            for stage, gpu in enumerate(gpus)
        ),
        couplings=facts.couplings,
        first=first,
        last=last,
        tokens=serving.max_model_len or 0,
    )


def best_cut(
    facts: ModelFacts,
    serving: Serving,
    gpus: Sequence[Gpu],
    *,
    workload: Workload | None = None,
    slowness: Sequence[int] | None = None,
) -> Partition:
    """The best legal partition of this model over these stages.

    Raises:
        ConfigurationError: the model's sizes are not known, or no cut into so many stages is legal.
        Refused: none fits; the largest max-model-len that would is named.
    """
    problem = partition_problem(facts, serving, gpus, workload=workload, slowness=slowness)
    try:
        return best_partition(problem)
    except Refused as refused:
        largest = largest_max_model_len(facts, serving, gpus)
        if largest is None or largest < 1:
            raise
        raise Refused(
            f"max-model-len {serving.max_model_len} fits under no cut into {len(gpus)} stages",
            hint=f"the largest that fits is {largest}",
        ) from refused


def largest_max_model_len(facts: ModelFacts, serving: Serving, gpus: Sequence[Gpu]) -> int | None:
    """The largest that fits under some legal cut, up to the native context; None: any does;
    0: the weights alone do not fit.

    Raises:
        ConfigurationError: as `partition_problem`.
    """
    problem = partition_problem(facts, replace(serving, max_model_len=None), gpus)
    row = unpacked_row(facts, serving.cache_type)

    def fits(factor: int) -> int:
        hosts = tuple(replace(host, cache=factor * row) for host in problem.hosts)
        return most_tokens(replace(problem, hosts=hosts))

    longest = longest_context(fits, serving.release, lengthless=fits(0) >= UNLIMITED)
    if longest is None or facts.context is None:
        return longest
    return min(longest, facts.context)


def _own_workspace(facts: ModelFacts, layers: Sequence[Layer], serving: Serving) -> int:
    return index_workspace(facts, layers, serving) - index_workspace(facts, (), serving)


def _per_token(facts: ModelFacts, layer: Layer, serving: Serving) -> int:
    return layer.cache.per_token(serving.cache_type, facts.number.activation, serving.tensor)


def _per_request(facts: ModelFacts, layer: Layer, serving: Serving) -> int:
    return layer.cache.per_request(
        serving.cache_type, facts.number.activation, serving.tensor, serving.drafts
    )


def _drafting(facts: ModelFacts, mtp: Sequence[Layer], serving: Serving, work: Workload) -> int:
    """The drafter's k runs: the first over all verified tokens, the others over one per request.

    A checkpoint with several MTP layers uses them in turn.
    """
    if not mtp:
        return 0
    total = 0
    for run in range(serving.drafts):
        tokens = work.requests * (serving.drafts + 1 if run == 0 else 1)
        total += _read(facts, mtp[run % len(mtp)], serving, tokens=tokens, work=work)
    return total


def _read(facts: ModelFacts, layer: Layer, serving: Serving, *, tokens: int, work: Workload) -> int:
    """Bytes a GPU reads for one run of `layer` over `tokens` tokens."""
    chosen = facts.experts.chosen if facts.experts else None
    touched = _touched(facts.experts.count, chosen, tokens) if facts.experts and chosen else None
    weights = Fraction(0)
    for weight in layer.weights:
        size = rank_bytes(facts, weight, serving.ranks, layer.prefix)
        if weight.split is Split.EXPERT and touched is not None:
            weights += size * touched
        else:
            weights += size
    return int(weights) + _cache_read(facts, layer, serving, tokens=tokens, work=work)


def _touched(experts: int, chosen: int, tokens: int) -> Fraction:
    """Expected share of the experts that `tokens` tokens choose, to a millionth."""
    return Fraction(round(1_000_000 * (1 - (1 - chosen / experts) ** tokens)), 1_000_000)


def _cache_read(
    facts: ModelFacts, layer: Layer, serving: Serving, *, tokens: int, work: Workload
) -> int:
    cache, activation = layer.cache, facts.number.activation
    if isinstance(cache, StateCache):
        return work.requests * cache.per_request(serving.cache_type, activation, serving.tensor, 0)
    if isinstance(cache, HeadCache):
        if cache.window:
            return work.requests * cache.per_request(
                serving.cache_type, activation, serving.tensor, 0
            )
        return (
            work.requests
            * work.context
            * cache.per_token(serving.cache_type, activation, serving.tensor)
        )
    latent = LatentCache(cache.rank, cache.rope, cache.sparse)
    row = latent.per_token(serving.cache_type, activation, serving.tensor)
    if not cache.sparse or facts.index_topk is None:
        return work.requests * work.context * row
    keys = cache.per_token(serving.cache_type, activation, serving.tensor) - row
    # Each token reads the rows picked for it; the indexer reads all keys once per request.
    return tokens * min(work.context, facts.index_topk) * row + work.requests * work.context * keys
