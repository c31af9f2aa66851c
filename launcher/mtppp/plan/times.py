"""How long a launch may be expected to take: what can be said without having measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtppp.errors import ConfigurationError
from mtppp.model.facts import ModelFacts
from mtppp.model.layers import Layer, Stack
from mtppp.model.weights import Ranks, Weight
from mtppp.plan.memory import known_stack, rank_bytes
from mtppp.plan.plan import Stage

DISK_RATE = 3e9
NETWORK_RATE = 1.2e9
"""Bytes per second that are assumed: one NVMe disk, a file system behind 10 Gb/s."""
_WHOLE = Ranks(1, None)


@dataclass(frozen=True, slots=True)
class Times:
    """What bounds a launch.

    Attributes:
        reads: bytes of weights that each node reads at most, in the order of the file; () where
            the model's sizes are not known.
        placement_timeout: seconds for all nodes to join Ray and their GPUs to be reserved.
        stall_timeout: seconds without a line in the server's log until a launch gives up.
    """

    reads: tuple[int, ...]
    placement_timeout: float
    stall_timeout: float

    @property
    def from_disk(self) -> float:
        """Seconds until the node that reads most has done so, at DISK_RATE."""
        return max(self.reads, default=0) / DISK_RATE

    @property
    def over_network(self) -> float:
        """The same at NETWORK_RATE."""
        return max(self.reads, default=0) / NETWORK_RATE


def node_reads(model: ModelFacts, stages: Sequence[Stage], nodes: int) -> tuple[int, ...]:
    """Bytes of the checkpoint that each node reads at most; () where sizes are not known.

    The ranks of a stage on one node share what the kernel has read; a stage over several nodes is
    read on each of them.
    """
    try:
        stack = known_stack(model)
        by_stage = {stage.index: _stage_bytes(model, stack, stage, len(stages)) for stage in stages}
    except ConfigurationError:
        return ()
    return tuple(
        sum(by_stage[stage.index] for stage in stages if node in stage.nodes)
        for node in range(nodes)
    )


def _stage_bytes(model: ModelFacts, stack: Stack, stage: Stage, stages: int) -> int:
    is_last = stage.index == stages - 1
    layers: Sequence[Layer] = stack.layers[stage.first_layer : stage.last_layer + 1]
    single: list[Weight] = []
    if stage.index == 0 or stage.drafter or (is_last and model.tied):
        single.append(stack.embedding)
    if is_last:
        single += [stack.norm, *(() if model.tied else (stack.head,))]
    drafter = stack.mtp if stage.drafter else ()
    return sum(rank_bytes(model, weight, _WHOLE) for weight in single) + sum(
        rank_bytes(model, weight, _WHOLE, layer.prefix)
        for layer in (*layers, *drafter)
        for weight in layer.weights
    )
