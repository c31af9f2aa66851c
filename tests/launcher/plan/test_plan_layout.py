from __future__ import annotations

import pytest

from mtppp.errors import ConfigurationError
from mtppp.plan.layout import assign_ranks, cut_into_stages
from mtppp.plan.plan import Rank, Stage


def nodes_of(gpus: list[int], tensor: int, pipeline: int) -> list[int]:
    """The node of each rank, in the order of ranks."""
    return [rank.node for rank in assign_ranks(gpus, tensor=tensor, pipeline=pipeline)]


def test_ranks_are_numbered_stage_by_stage() -> None:
    assert assign_ranks([2, 2], tensor=2, pipeline=2) == (
        Rank(rank=0, stage=0, tensor_rank=0, node=0),
        Rank(rank=1, stage=0, tensor_rank=1, node=0),
        Rank(rank=2, stage=1, tensor_rank=0, node=1),
        Rank(rank=3, stage=1, tensor_rank=1, node=1),
    )


@pytest.mark.parametrize(
    ("gpus", "tensor", "pipeline", "nodes"),
    [
        ([1], 1, 1, [0]),
        ([8], 8, 1, [0] * 8),
        ([8, 8], 8, 2, [0] * 8 + [1] * 8),
        # One stage fills the nodes in turn; the last may have GPUs left.
        ([1, 1], 2, 1, [0, 1]),
        ([4, 8], 6, 1, [0, 0, 0, 0, 1, 1]),
        ([1, 2, 1], 4, 1, [0, 1, 1, 2]),
        # More stages than nodes: the emptiest takes the next, the earlier of two equals.
        ([4], 1, 4, [0, 0, 0, 0]),
        ([2, 2], 1, 3, [0, 0, 1]),
        ([2, 2], 1, 4, [0, 0, 1, 1]),
        ([1, 4], 1, 4, [0, 1, 1, 1]),
        ([4, 1], 1, 4, [0, 0, 0, 1]),
        ([1, 4, 2], 1, 5, [0, 1, 1, 2, 2]),
        ([8, 8], 4, 3, [0] * 8 + [1] * 4),
        # GPUs that are too few for a further stage stay idle.
        ([5, 7], 4, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_where_ranks_go(gpus: list[int], tensor: int, pipeline: int, nodes: list[int]) -> None:
    assert nodes_of(gpus, tensor, pipeline) == nodes


@pytest.mark.parametrize(
    ("gpus", "tensor"),
    [([1, 1], 1), ([3, 2, 4], 1), ([3, 2, 4], 2), ([8, 1, 1, 8], 1), ([5, 7], 2)],
)
def test_a_stage_stays_on_one_node_and_stages_follow_the_nodes(
    gpus: list[int], tensor: int
) -> None:
    room = [count // tensor for count in gpus]
    for pipeline in range(len(gpus), sum(room) + 1):
        ranks = assign_ranks(gpus, tensor=tensor, pipeline=pipeline)
        assert [rank.rank for rank in ranks] == list(range(tensor * pipeline))
        by_stage = [{r.node for r in ranks if r.stage == stage} for stage in range(pipeline)]
        assert all(len(nodes) == 1 for nodes in by_stage)
        order = [nodes.pop() for nodes in by_stage]
        assert order == sorted(order)
        assert set(order) == set(range(len(gpus)))
        for node, count in enumerate(gpus):
            assert sum(rank.node == node for rank in ranks) <= count


@pytest.mark.parametrize(
    ("gpus", "tensor", "pipeline", "message", "hint"),
    [
        (
            [4, 4],
            9,
            1,
            "parallel.tensor is 9, but the nodes have 8 GPUs",
            "lower parallel.tensor or add nodes",
        ),
        (
            [8, 8],
            8,
            1,
            "parallel.tensor is 8: nodes[1] and those after it would be idle",
            "remove those nodes from the file, or raise parallel.tensor",
        ),
        (
            [2, 2, 2],
            3,
            1,
            "parallel.tensor is 3: nodes[2] and those after it would be idle",
            "remove those nodes from the file, or raise parallel.tensor",
        ),
        (
            [8, 4],
            8,
            2,
            "nodes[1] has 4 GPUs, but a stage needs parallel.tensor = 8 GPUs on one node",
            "a stage does not span nodes: lower parallel.tensor, or use pipeline: 1",
        ),
        (
            [1, 1, 1],
            1,
            2,
            "parallel.pipeline is 2, but there are 3 nodes: some would hold no stage",
            "set parallel.pipeline to 3 or more, or remove nodes",
        ),
        (
            [5, 7],
            4,
            3,
            "parallel.pipeline is 3, but with parallel.tensor = 4 the nodes have room for 2 stages",
            "lower parallel.pipeline or parallel.tensor, or add nodes",
        ),
    ],
)
def test_what_does_not_fit(
    gpus: list[int], tensor: int, pipeline: int, message: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        assign_ranks(gpus, tensor=tensor, pipeline=pipeline)
    assert (raised.value.message, raised.value.hint) == (message, hint)


def test_stages_hold_layers_end_to_end_and_the_last_the_drafter() -> None:
    ranks = assign_ranks([2, 1], tensor=1, pipeline=3)
    assert cut_into_stages(ranks, [3, 2, 1], drafter=True) == (
        Stage(index=0, nodes=(0,), first_layer=0, last_layer=2, drafter=False),
        Stage(index=1, nodes=(0,), first_layer=3, last_layer=4, drafter=False),
        Stage(index=2, nodes=(1,), first_layer=5, last_layer=5, drafter=True),
    )


def test_one_stage_on_several_nodes_and_no_drafter() -> None:
    ranks = assign_ranks([1, 1], tensor=2, pipeline=1)
    assert cut_into_stages(ranks, [6], drafter=False) == (
        Stage(index=0, nodes=(0, 1), first_layer=0, last_layer=5, drafter=False),
    )
