"""Watches, while the engine serves, that its stages compute one and the same model.

No reference is needed: what is compared are the ranks of the engine with each other, see
`observations`. On a sampled step each rank adds a few checksums to its GPU's queue and copies them
to the host without waiting. Now and then the engine asks all ranks for what has arrived, by the
same channel that carries its steps to workers on any host, and without waiting either. It counts
violations, logs them with step and rank, keeps the counts in the node's run directory, where the
API server reads them for /metrics, and stops at the first one if the deployment says so.

Where a GPU replays a graph, python does not run: the order in which layers choose and re-use
sparse-attention indices is then watched when the graph is captured, which fixes it.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mtppp_patches.engine_spec import RUN_DIR_VARIABLE, EngineSpec
from mtppp_patches.observations import (
    INVARIANTS,
    Ledger,
    Observation,
    Place,
    Report,
    read_counts,
)
from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import RELEASES, releases

Function = Callable[..., Any]

_COLLECT_EVERY = 5
"""Samples from one collection of what the ranks saw to the next."""
_ROWS = 64
"""Rows of a handed-over tensor that its checksum covers, spread over the step's tokens."""

_SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})


class InvariantViolatedError(RuntimeError):
    """The engine's ranks do not compute one model, and the deployment says to stop then."""


class Watch:
    """One rank's observations. One per process.

    Steps count from when the engine serves: in those that warm it up a stage embeds what it has,
    not what the last stage drafted. Indices are watched before, too: graphs are captured then.

    Attributes:
        sample_every: steps from one that is looked at to the next.
    """

    def __init__(self) -> None:
        self.sample_every = 1
        self._serving = False
        self._steps = 0
        self._plans = 0
        self._copied: deque[tuple[int, int, Any, Any]] = deque()
        self._in_model = False
        self._indices_are_own = False
        self._index_checks = 0
        self._foreign_indices: list[tuple[int, int]] = []

    def serve(self) -> None:
        """The engine serves."""
        self._serving = True

    def hear(self, plan: Any) -> None:
        """The scheduler asks for a step, perhaps without tokens, only to tell which requests ended.

        Args:
            plan: vLLM's SchedulerOutput.
        """
        if not self._serving:
            return
        self._plans = digest(plan, self._plans)

    def step(self, batch: Any, handed_over: Any) -> None:
        """A step's forward pass is in the GPU's queue.

        Args:
            batch: vLLM's InputBatch of that step.
            handed_over: IntermediateTensors, or None on the last stage.
        """
        import torch

        if not self._serving:
            return
        self._steps += 1
        if self._steps % self.sample_every:
            return
        plans, self._plans = self._plans, 0
        rows = batch.num_tokens
        tensors = handed_over.tensors if handed_over is not None else {}
        sums = [checksum(batch.input_ids[:rows])]
        for name in sorted(tensors):
            every = -(-rows // _ROWS)
            sums.append(checksum(tensors[name][:rows:every]))
        stacked = torch.stack(sums)
        if not stacked.is_cuda:
            self._copied.append((self._steps, plans, stacked, None))
            return
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._copied.append((self._steps, plans, host, arrived))

    def enter_model(self) -> None:
        self._in_model, self._indices_are_own = True, False

    def leave_model(self) -> None:
        self._in_model = False

    def layer(self, index: int, *, computes_indices: bool) -> None:
        """A layer with sparse attention begins. A drafter's is none of the model's."""
        if not self._in_model:
            return
        if computes_indices:
            self._indices_are_own = True
            return
        self._index_checks += 1
        if not self._indices_are_own:
            # The step under way is counted only when its forward pass is through.
            self._foreign_indices.append((self._steps + 1, index))

    def report(self, place: Place, ranks: int) -> Report:
        """What has arrived since the last report."""
        report = Report(
            place,
            ranks,
            tuple(self._arrived()),
            self._index_checks,
            tuple(self._foreign_indices),
        )
        self._index_checks, self._foreign_indices = 0, []
        return report

    def _arrived(self) -> Iterator[Observation]:
        while self._copied:
            step, plan, sums, arrived = self._copied[0]
            if arrived is not None and not arrived.query():
                return
            self._copied.popleft()
            token_ids, *handed_over = sums.tolist()
            yield Observation(step, plan, token_ids, tuple(handed_over))


WATCH = Watch()


def report(worker: Any) -> Report:
    """What this process's rank has seen; called in each worker by the engine."""
    from vllm.distributed import get_pp_group, get_tp_group

    place = Place(get_pp_group().rank_in_group, get_tp_group().rank_in_group)
    return WATCH.report(place, get_pp_group().world_size * get_tp_group().world_size)


def serve(worker: Any) -> None:
    """Called in each worker by the engine after the first step of a request."""
    WATCH.serve()


def checksum(tensor: Any) -> Any:
    """A scalar tensor: what `tensor` holds, bit by bit and in this order, as one int64."""
    import torch

    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.contiguous().view(-1).view(width[tensor.element_size()]).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return (words * places).sum()


def digest(plan: Any, before: int) -> int:
    """Of which requests a step has, how many tokens of each, how many of them drafts; and of what
    was asked for before."""
    drafts = plan.scheduled_spec_decode_tokens
    facts = [(name, n, len(drafts.get(name, ()))) for name, n in plan.num_scheduled_tokens.items()]
    return zlib.crc32(repr((facts, sorted(plan.finished_req_ids))).encode(), before)


class Monitor:
    """The engine's side. One per engine.

    Args:
        collect: asks all ranks for their reports.
        directory: where the counts are kept.
        every: steps from one collection to the next.
        stop: whether a violation ends the engine.
    """

    def __init__(
        self, collect: Callable[[], Future[Any]], directory: Path, *, every: int, stop: bool
    ) -> None:
        from vllm.logger import init_logger

        self._collect = collect
        self._directory = directory
        self._every = every
        self._stop = stop
        self._logger = init_logger("vllm.mtppp")
        self._ledger = Ledger()
        self._steps = 0
        self._asked: Future[list[Report]] | None = None
        self._ledger.write(directory)

    def after_step(self) -> None:
        """Ask, or take up the answer that has come by now.

        Raises:
            InvariantViolatedError: the deployment stops at a violation and there was one.
        """
        self._steps += 1
        if self._asked is not None and self._asked.done():
            reports = self._asked.result()
            self._asked = None
            self._judge(reports)
        if self._asked is None and self._steps >= self._every:
            self._steps = 0
            self._asked = self._collect()

    def _judge(self, reports: list[Report]) -> None:
        violations = self._ledger.take(reports)
        self._ledger.write(self._directory)
        for violation in violations:
            self._logger.error("%s", violation)
        if violations and self._stop:
            raise InvariantViolatedError(
                f"{violations[0]}. The ranks do not compute one model; stopping, as the "
                "deployment says."
            )


def _observe_step(original: Function, spec: EngineSpec) -> Function:
    WATCH.sample_every = spec.sample_every

    def execute_model(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None, *rest: Any, **named: Any
    ) -> Any:
        output = original(self, scheduler_output, intermediate_tensors, *rest, **named)
        if rest[0] if rest else named.get("dummy_run", False):
            return output
        WATCH.hear(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            handed_over = None if self.is_last_pp_rank else output
            WATCH.step(self.execute_model_state.input_batch, handed_over)
        return output

    return execute_model


def _watch_from_the_engine(original: Function, spec: EngineSpec) -> Function:
    monitors: WeakKeyDictionary[Any, Monitor] = WeakKeyDictionary()

    def post_step(self: Any, model_executed: bool) -> None:
        original(self, model_executed)
        if not model_executed:
            return
        monitor = monitors.get(self)
        if monitor is None:
            executor = self.model_executor
            # Comes to every rank between the same two steps. (The engine loads plugins while it is
            # being made: a replacement of its constructor would come too late.)
            executor.collective_rpc(serve, non_block=True)
            monitor = monitors[self] = Monitor(
                lambda: executor.collective_rpc(report, non_block=True),
                Path(os.environ[RUN_DIR_VARIABLE]),
                every=_COLLECT_EVERY * spec.sample_every,
                stop=spec.invariants == "stop",
            )
        monitor.after_step()

    return post_step


def _export(original: Function, spec: EngineSpec) -> Function:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        original(self, *arguments, **named)
        register_metrics(Path(os.environ[RUN_DIR_VARIABLE]))

    return __init__


def register_metrics(directory: Path) -> None:
    """Let this process's /metrics tell what the engine wrote to `directory`."""
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily

    class Counts:
        def collect(self) -> Iterator[CounterMetricFamily]:
            for name, text, counts in zip(
                ("mtppp_invariant_checks", "mtppp_invariant_violations"),
                ("Times an invariant was checked.", "Times an invariant did not hold."),
                read_counts(directory),
                strict=True,
            ):
                family = CounterMetricFamily(name, text, labels=["invariant"])
                for invariant in INVARIANTS:
                    family.add_metric([invariant], counts[invariant])
                yield family

    REGISTRY.register(Counts())


def _around_the_model(original: Function, spec: EngineSpec) -> Function:
    if spec.model_type not in _SPARSE:
        return original

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        WATCH.enter_model()
        try:
            return original(self, *arguments, **named)
        finally:
            WATCH.leave_model()

    return forward


def _at_each_layer(original: Function, spec: EngineSpec) -> Function:
    if spec.model_type not in _SPARSE:
        return original

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        attention = self.self_attn
        skips = getattr(attention, "mla_attn", attention).skip_topk
        own = attention.indexer is not None and not skips
        WATCH.layer(self.layer_idx, computes_indices=own)
        return original(self, *arguments, **named)

    return forward


def _on_cpus(replace: Callable[[Function, EngineSpec], Function]) -> Callable[..., Function]:
    """Of the classes that vLLM builds these models with on CPUs; GPUs compile them whole."""

    def choose(original: Function, spec: EngineSpec) -> Function:
        return replace(original, spec) if spec.device == "cpu" else original

    return choose


_RUNNER = "vllm.v1.worker.gpu.model_runner"
_NVIDIA = "vllm.models.deepseek_v32.nvidia.model"
_AMD = "vllm.models.deepseek_v32.amd.model"
_GENERIC = "vllm.model_executor.models.deepseek_v2"
_SINCE = releases("0.29.0", RELEASES[-1])

PATCH = Patch(
    name="invariants",
    why=(
        "A deployment that was right at launch can go wrong later, silently: nothing in vLLM "
        "compares what the ranks of a pipeline compute."
    ),
    releases=RELEASES,
    obsolete_by="nothing up to 0.33.0",
    scope="deployment",
    wanted=lambda spec: (
        spec.invariants != "off"
        and spec.pipeline > 1
        and spec.runner == "v2"
        and spec.data_parallel == 1
    ),
    targets=(
        Target(_RUNNER, "GPUModelRunner.execute_model", _observe_step),
        Target("vllm.v1.engine.core", "EngineCore.post_step", _watch_from_the_engine),
        Target("vllm.v1.engine.async_llm", "AsyncLLM.__init__", _export),
        Target(_NVIDIA, "DeepseekV32Model.forward", _around_the_model, _SINCE),
        Target(_NVIDIA, "DeepseekV32DecoderLayer.forward", _at_each_layer, _SINCE),
        Target(_AMD, "DeepseekV32Model.forward", _around_the_model, _SINCE),
        Target(_AMD, "DeepseekV32DecoderLayer.forward", _at_each_layer, _SINCE),
        Target(_GENERIC, "DeepseekV2Model.forward", _on_cpus(_around_the_model), _SINCE),
        Target(_GENERIC, "DeepseekV2DecoderLayer.forward", _on_cpus(_at_each_layer), _SINCE),
        Target("vllm.v1.executor.multiproc_executor", "FutureWrapper"),
    ),
)
