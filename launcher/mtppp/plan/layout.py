"""Which rank runs on which node, and which layers each stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from mtppp.errors import ConfigurationError
from mtppp.plan.plan import Rank, Stage


def assign_ranks(gpus: Sequence[int], *, tensor: int, pipeline: int) -> tuple[Rank, ...]:
    """Place `tensor * pipeline` ranks on nodes, in the order of the nodes.

    With pipeline parallelism a stage stays within one node, and every node holds at least one
    stage: the first node stage 0, the last node the last. Without, the one stage spans the nodes,
    filling each in turn.

    Args:
        gpus: GPUs of each node, in pipeline order.
        tensor, pipeline: parallel sizes, at least 1.

    Raises:
        ConfigurationError: the ranks do not fit in that way.
    """
    nodes = (
        _nodes_of_one_stage(gpus, tensor)
        if pipeline == 1
        else [node for node in _nodes_of_stages(gpus, tensor, pipeline) for _ in range(tensor)]
    )
    return tuple(
        Rank(rank=rank, stage=rank // tensor, tensor_rank=rank % tensor, node=node)
        for rank, node in enumerate(nodes)
    )


def _nodes_of_one_stage(gpus: Sequence[int], tensor: int) -> list[int]:
    nodes = [node for node, count in enumerate(gpus) for _ in range(count)][:tensor]
    if len(nodes) < tensor:
        raise ConfigurationError(
            f"parallel.tensor is {tensor}, but the nodes have {sum(gpus)} GPUs",
            hint="lower parallel.tensor or add nodes",
        )
    if nodes[-1] != len(gpus) - 1:
        raise ConfigurationError(
            f"parallel.tensor is {tensor}: nodes[{nodes[-1] + 1}] and those after it would be idle",
            hint="remove those nodes from the file, or raise parallel.tensor",
        )
    return nodes


def _nodes_of_stages(gpus: Sequence[int], tensor: int, pipeline: int) -> list[int]:
    room = [count // tensor for count in gpus]
    if min(room) == 0:
        node = room.index(0)
        raise ConfigurationError(
            f"nodes[{node}] has {gpus[node]} GPUs, but a stage needs parallel.tensor = {tensor}"
            " GPUs on one node",
            hint="a stage does not span nodes: lower parallel.tensor, or use pipeline: 1",
        )
    if len(gpus) > pipeline:
        raise ConfigurationError(
            f"parallel.pipeline is {pipeline}, but there are {len(gpus)} nodes:"
            " some would hold no stage",
            hint=f"set parallel.pipeline to {len(gpus)} or more, or remove nodes",
        )
    if sum(room) < pipeline:
        raise ConfigurationError(
            f"parallel.pipeline is {pipeline}, but with parallel.tensor = {tensor}"
            f" the nodes have room for {sum(room)} stages",
            hint="lower parallel.pipeline or parallel.tensor, or add nodes",
        )
    stages = [1] * len(gpus)
    while sum(stages) < pipeline:
        # The emptiest node with room takes the next stage, the earlier one of two equals.
        node = min(
            (node for node in range(len(gpus)) if stages[node] < room[node]),
            key=lambda node: (stages[node], node),
        )
        stages[node] += 1
    return [node for node, count in enumerate(stages) for _ in range(count)]


def cut_into_stages(
    ranks: Sequence[Rank], partition: Sequence[int], *, drafter: bool
) -> tuple[Stage, ...]:
    """The stages of a placement: `partition` has the number of layers of each."""
    stages = []
    first = 0
    for index, layers in enumerate(partition):
        nodes = sorted({rank.node for rank in ranks if rank.stage == index})
        stages.append(
            Stage(
                index=index,
                nodes=tuple(nodes),
                first_layer=first,
                last_layer=first + layers - 1,
                drafter=drafter and index == len(partition) - 1,
            )
        )
        first += layers
    return tuple(stages)
