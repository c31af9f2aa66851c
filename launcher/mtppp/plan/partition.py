"""Cuts a model's layers into contiguous pipeline stages: the best legal cut, exactly.

Given what each layer costs, the best partition is, in this order:

1. legal: no stage begins where a coupling forbids it, and every stage has a layer;
2. fitting: on every stage the KV cache beside the weights holds at least `Problem.tokens` tokens;
3. fast: the slowest stage's time is as small as it can be;
4. roomy: among those, the KV cache of the fullest stage holds as many tokens as it can (vLLM
   gives every stage as many cache blocks as the fullest has room for);
5. even: among those, the sum of the squared stage times is smallest;
6. among those, the one with more layers on earlier stages, compared from the first.

Costs are whole numbers, so that nothing depends on rounding. Each of 3 to 5 is one dynamic
programme over (stage, first layer), with the earlier results as bounds: at most
stages x starts^2 steps, in practice far fewer, since the bounds end most inner loops early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from mtppp.errors import ConfigurationError, Refused
from mtppp.model.couplings import Couplings

UNLIMITED = 1 << 62
"""Tokens of a stage whose layers keep nothing per token."""


@dataclass(frozen=True)
class Cost:
    """What a layer, or what stands before or behind all layers, costs each GPU of its stage.

    Attributes:
        time: of one step, in any unit (`mtppp.plan.costs` counts bytes read).
        memory: resident bytes, with what the cache needs whatever the context's length.
        cache: bytes per token of KV cache.
    """

    time: int = 0
    memory: int = 0
    cache: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.time + other.time, self.memory + other.memory, self.cache + other.cache)


@dataclass(frozen=True)
class StageHost:
    """The GPUs one stage runs on.

    Attributes:
        memory: bytes per GPU for weights and KV cache; the smallest of the stage.
        slowness: factor on `Cost.time`; equal GPUs have equal ones.
        cache: bytes per token of KV cache whatever the layers.
    """

    memory: int
    slowness: int = 1
    cache: int = 0


@dataclass(frozen=True)
class Problem:
    """What to cut.

    Attributes:
        layers: cost of each decoder layer.
        first: of what stands before the first layer (embedding).
        last: of what stands behind the last (norm, head, drafter with its k runs, its embedding).
        hosts: one for each stage, in pipeline order.
        tokens: that every stage's KV cache must hold; 0: the weights alone must fit.
    """

    layers: tuple[Cost, ...]
    hosts: tuple[StageHost, ...]
    couplings: Couplings
    first: Cost = Cost()
    last: Cost = Cost()
    tokens: int = 0


@dataclass(frozen=True)
class StageLoad:
    """One stage of a partition: layers `first` to `last`, and its cost."""

    first: int
    last: int
    time: int
    memory: int
    tokens: int

    @property
    def layers(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Partition:
    """A partition and what it comes to."""

    stages: tuple[StageLoad, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stage.layers for stage in self.stages)

    @property
    def time(self) -> int:
        """Of the slowest stage."""
        return max(stage.time for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of the fullest stage."""
        return min(stage.tokens for stage in self.stages)

    def __str__(self) -> str:
        return in_words(self.counts)


_LISTED = 8


def in_words(counts: Sequence[int]) -> str:
    """Layers of each stage: "42/36"; of many stages "28 stages of 2, 36 of 1"."""
    if len(counts) <= _LISTED:
        return "/".join(map(str, counts))
    runs = [(layers, len(list(run))) for layers, run in groupby(counts)]
    (layers, stages), *others = runs
    first = f"{stages} stage{'s' * (stages > 1)} of {layers}"
    return ", ".join([first, *(f"{n} of {size}" for size, n in others)])


@dataclass(frozen=True)
class Violation:
    """A stage that begins where it may not.

    Attributes:
        stage: its number.
        layer: its first layer.
        why: the coupling it cuts.
        nearest: legal starts on both sides (one of them at an end).
    """

    stage: int
    layer: int
    why: str
    nearest: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"stage {self.stage} would begin at layer {self.layer}, inside {self.why}; "
            f"the nearest layers it may begin at: {' or '.join(map(str, self.nearest))}"
        )


def vllm_default(layers: int, stages: int) -> tuple[int, ...]:
    """The layers per stage vLLM takes without VLLM_PP_LAYER_PARTITION.

    `get_pp_indices` in `distributed/utils.py`, the same in 0.23.0 to 0.33.0: the remainder goes
    one each to the stages before the last, from the back.
    """
    counts = [layers // stages] * stages
    for offset in range(2, layers % stages + 2):
        counts[-offset] += 1
    return tuple(counts)


def check_partition(
    counts: Sequence[int], layers: int, couplings: Couplings
) -> tuple[Violation, ...]:
    """Every stage of `counts` that begins where a coupling forbids it.

    Raises:
        ConfigurationError: the counts do not add up to the model's layers, or one is below 1.
    """
    if sum(counts) != layers or min(counts) < 1:
        raise ConfigurationError(
            f"layer_partition {'/'.join(map(str, counts))} has {sum(counts)} layers over "
            f"{len(counts)} stages; the model has {layers}, and every stage needs one"
        )
    legal = couplings.legal_starts(layers)
    violations = []
    for stage, start in enumerate(accumulate(counts[:-1]), start=1):
        coupling = couplings.forbidding(start)
        if coupling is None:
            continue
        below = max(candidate for candidate in legal if candidate < start)
        above = [candidate for candidate in legal if candidate > start][:1]
        # Layer 0 begins stage 0: no later stage can.
        nearest = ([below] if below else []) + above
        violations.append(Violation(stage, start, str(coupling), tuple(nearest)))
    return tuple(violations)


def nearest_legal(
    counts: Sequence[int], layers: int, couplings: Couplings
) -> tuple[tuple[int, ...], ...]:
    """Legal partitions near an illegal one: its cuts moved down, and moved up, to legal starts.

    Both, one, or none, where moving makes two cuts meet.
    """
    legal = couplings.legal_starts(layers)
    cuts = list(accumulate(counts[:-1]))
    found = []
    for moved in (
        [max((start for start in legal if start <= cut), default=0) for cut in cuts],
        [min((start for start in legal if start >= cut), default=layers) for cut in cuts],
    ):
        edges = [0, *moved, layers]
        spans = tuple(end - begin for begin, end in pairwise(edges))
        if min(spans) > 0 and spans not in found:
            found.append(spans)
    return tuple(found)


def refuse_illegal(counts: Sequence[int], layers: int, couplings: Couplings) -> None:
    """Passes a partition only when it is legal.

    Raises:
        Refused: a stage begins inside a coupling; every such stage is named, with the way out.
        ConfigurationError: it is not a partition of the model's layers.
    """
    violations = check_partition(counts, layers, couplings)
    if not violations:
        return
    alternatives = [
        "/".join(map(str, candidate)) for candidate in nearest_legal(counts, layers, couplings)
    ]
    raise Refused(
        f"layer_partition {'/'.join(map(str, counts))}: {violations[0]}",
        hint=f"use {' or '.join(alternatives)}, or auto" if alternatives else "use auto",
        details=[str(violation) for violation in violations[1:]],
    )


def evaluate(problem: Problem, counts: Sequence[int]) -> Partition:
    """What a given partition comes to, legal or not.

    Raises:
        ConfigurationError: it does not have the problem's layers and stages.
    """
    if sum(counts) != len(problem.layers) or len(counts) != len(problem.hosts) or min(counts) < 1:
        raise ConfigurationError(
            f"{'/'.join(map(str, counts))} does not cut {len(problem.layers)} layers into "
            f"{len(problem.hosts)} stages"
        )
    spans = _Spans(problem)
    edges = [0, *accumulate(counts)]
    return Partition(
        tuple(spans.load(stage, begin, end) for stage, (begin, end) in enumerate(pairwise(edges)))
    )


def best_partition(problem: Problem) -> Partition:
    """The best partition, in the order the module's docstring gives.

    Raises:
        ConfigurationError: no cut into that many stages is legal.
        Refused: none fits.
    """
    starts = problem.couplings.legal_starts(len(problem.layers))
    if len(starts) < len(problem.hosts):
        raise ConfigurationError(
            f"{len(problem.hosts)} stages, but only {len(starts)} layers at which one may begin",
            hint=f"use at most {len(starts)} pipeline stages",
        )
    search = _Search(problem, [*starts, len(problem.layers)])
    time = search.best(lambda time, tokens: time, max)
    if time is None:
        raise _does_not_fit(problem)
    search.slowest = time
    # As the smallest of a negative: the search minimises.
    room = search.best(lambda time, tokens: -tokens, max)
    assert room is not None
    search.fewest = -room
    return search.trace(lambda time, tokens: time**2)


def most_tokens(problem: Problem) -> int:
    """The most tokens that the KV cache can hold under any legal partition; -1: none fits."""
    starts = problem.couplings.legal_starts(len(problem.layers))
    search = _Search(problem, [*starts, len(problem.layers)])
    search.fewest = 0
    room = search.best(lambda time, tokens: -tokens, max)
    return -1 if room is None else -room


def _does_not_fit(problem: Problem) -> Refused:
    most = most_tokens(problem)
    if most < 0:
        return Refused(
            f"no cut into {len(problem.hosts)} stages fits the weights into the GPUs",
            hint="more stages, more tensor parallelism, larger GPUs or a smaller checkpoint",
        )
    return Refused(
        f"no cut into {len(problem.hosts)} stages leaves room for {problem.tokens} tokens",
        hint=f"there is room for {most} at most",
    )


class _Spans:
    """Costs of any run of layers on any stage, from prefix sums."""

    def __init__(self, problem: Problem) -> None:
        self._hosts = problem.hosts
        self._times = list(accumulate((cost.time for cost in problem.layers), initial=0))
        self._memories = list(accumulate((cost.memory for cost in problem.layers), initial=0))
        self._caches = list(accumulate((cost.cache for cost in problem.layers), initial=0))
        self._extras = [Cost(cache=host.cache) for host in problem.hosts]
        self._extras[0] += problem.first
        self._extras[-1] += problem.last

    def measure(self, stage: int, begin: int, end: int) -> tuple[int, int, int]:
        """Time, memory and tokens of layers `begin` to `end - 1` on `stage`."""
        extra, host = self._extras[stage], self._hosts[stage]
        time = (self._times[end] - self._times[begin] + extra.time) * host.slowness
        memory = self._memories[end] - self._memories[begin] + extra.memory
        cache = self._caches[end] - self._caches[begin] + extra.cache
        room = host.memory - memory
        return time, memory, -1 if room < 0 else room // cache if cache else UNLIMITED

    def load(self, stage: int, begin: int, end: int) -> StageLoad:
        time, memory, tokens = self.measure(stage, begin, end)
        return StageLoad(begin, end - 1, time, memory, tokens)


class _Search:
    """Dynamic programmes over the legal starts, with bounds on a stage's time and tokens."""

    def __init__(self, problem: Problem, edges: Sequence[int]) -> None:
        self._edges = edges
        self._stages = len(problem.hosts)
        self._spans = _Spans(problem)
        self.slowest: int | None = None
        self.fewest = problem.tokens

    def best(
        self, value: Callable[[int, int], int], combine: Callable[[int, int], int]
    ) -> int | None:
        """The smallest combined value of all stages; None: no partition is within the bounds.

        Args:
            value: of one stage's time and tokens; must not shrink when it gets more layers.
            combine: max or a sum of values that are not negative.
        """
        return self._table(value, combine)[0].get(0)

    def trace(self, value: Callable[[int, int], int]) -> Partition:
        """The partition with the smallest sum of values; of equals the one with more layers on
        earlier stages. One within the bounds must exist."""
        table = self._table(value, lambda one, other: one + other)
        stages: list[StageLoad] = []
        begin = 0
        for stage in range(self._stages):
            remaining = table[stage][begin]
            for end in reversed(self._ends(stage, begin)):
                rest = table[stage + 1].get(end)
                if rest is None:
                    continue
                span = stage, self._edges[begin], self._edges[end]
                time, _, tokens = self._spans.measure(*span)
                if self._within(time, tokens) and value(time, tokens) + rest == remaining:
                    stages.append(self._spans.load(*span))
                    begin = end
                    break
        return Partition(tuple(stages))

    def _table(
        self, value: Callable[[int, int], int], combine: Callable[[int, int], int]
    ) -> list[dict[int, int]]:
        """For each stage and edge it may begin at: the best value of it and all that follow."""
        last_edge = len(self._edges) - 1
        table: list[dict[int, int]] = [{} for _ in range(self._stages)]
        table.append({last_edge: -UNLIMITED if combine is max else 0})
        for stage in reversed(range(self._stages)):
            for begin in self._begins(stage):
                best: int | None = None
                for end in self._ends(stage, begin):
                    time, _, tokens = self._spans.measure(
                        stage, self._edges[begin], self._edges[end]
                    )
                    # More layers make a stage only slower and fuller.
                    if not self._within(time, tokens):
                        break
                    own = value(time, tokens)
                    if best is not None and own >= best:
                        break
                    rest = table[stage + 1].get(end)
                    if rest is None:
                        continue
                    total = combine(own, rest)
                    if best is None or total < best:
                        best = total
                if best is not None:
                    table[stage][begin] = best
        return table

    def _within(self, time: int, tokens: int) -> bool:
        return tokens >= max(0, self.fewest) and (self.slowest is None or time <= self.slowest)

    def _begins(self, stage: int) -> range:
        if stage == 0:
            return range(1)
        return range(stage, len(self._edges) - self._stages + stage)

    def _ends(self, stage: int, begin: int) -> range:
        if stage == self._stages - 1:
            return range(len(self._edges) - 1, len(self._edges))
        return range(begin + 1, len(self._edges) - self._stages + stage + 1)


def explain(problem: Problem, chosen: Partition, *, memory_known: bool = True) -> tuple[str, ...]:
    """Why this cut: what limits it, and what vLLM's own would have been. One sentence a line.

    Args:
        memory_known: the hosts' memory is their GPUs'; if not, nothing is said of room.
    """
    lines = [f"{chosen}: {_summary(chosen, memory_known)}"]
    if problem.couplings.items:
        lines.append(
            f"stages may begin at {len(problem.couplings.legal_starts(len(problem.layers)))} of "
            f"{len(problem.layers)} layers ({problem.couplings.evidence})"
        )
    elif not problem.couplings.known:
        lines.append(f"couplings across layers are not known: {problem.couplings.evidence}")
    default = evaluate(problem, vllm_default(len(problem.layers), len(problem.hosts)))
    if default.counts == chosen.counts:
        lines.append("vLLM's own cut is the same")
        return tuple(lines)
    violations = check_partition(default.counts, len(problem.layers), problem.couplings)
    if violations:
        lines.append(f"vLLM's own cut {default} is illegal: {violations[0]}")
    else:
        lines.append(f"vLLM's own cut {default} is legal: {_summary(default, memory_known)}")
    if default.time and not violations:
        lines.append(f"its slowest stage takes {default.time / chosen.time - 1:+.1%} time")
    return tuple(lines)


def _summary(partition: Partition, memory_known: bool) -> str:
    slowest = max(range(len(partition.stages)), key=lambda stage: partition.stages[stage].time)
    total = sum(stage.time for stage in partition.stages)
    load = f"{partition.time * len(partition.stages) / total - 1:.1%}" if total else "0.0%"
    summary = f"stage {slowest} is the slowest, {load} above the mean"
    if not memory_known:
        return summary
    fullest = min(range(len(partition.stages)), key=lambda stage: partition.stages[stage].tokens)
    tokens = partition.stages[fullest].tokens
    room = (
        "does not fit"
        if tokens < 0
        else "room for any number of tokens"
        if tokens == UNLIMITED
        else f"room for {tokens:,} tokens"
    )
    return f"{summary}; stage {fullest} the fullest, {room}"
