from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest

from mtppp.errors import ConfigurationError, Refused
from mtppp.model.config import find_config
from mtppp.model.couplings import Coupling, Couplings
from mtppp.model.facts import read_facts
from mtppp.plan.costs import Workload, best_cut, largest_max_model_len, partition_problem
from mtppp.plan.memory import GIB, Gpu, Serving
from mtppp.plan.partition import (
    UNLIMITED,
    Cost,
    Partition,
    Problem,
    StageHost,
    best_partition,
    check_partition,
    evaluate,
    explain,
    in_words,
    most_tokens,
    nearest_legal,
    refuse_illegal,
    vllm_default,
)

GLM = read_facts(find_config("zai-org/GLM-5.2-FP8", environ={}).values)
H100 = Gpu(80 * GIB)
MTP = Serving(tensor=8, drafts=3, cache_type="fp8")
FREE = Couplings((), known=True, evidence="none")


def random_problem(source: random.Random) -> Problem:
    """Up to 10 layers on up to 5 stages, small enough to try every cut.

    Costs come from small ranges so that ties are common; cache costs of 0, stages that cannot
    fit, stages of unlike memory and speed, and chains of couplings all occur.
    """
    layers = source.randint(1, 10)
    stages = source.randint(1, min(layers, 5))
    wide = source.random() < 0.5
    high = 1000 if wide else 4
    couplings = []
    for _ in range(source.choice([0, 0, 1, 2])):
        first = source.randrange(layers)
        couplings.append(Coupling(first, source.randrange(first, layers), "something"))

    def cost() -> Cost:
        return Cost(
            source.randint(0, high), source.randint(0, high), source.choice([0, 1, 1, 2, 3])
        )

    total = layers * high
    return Problem(
        layers=tuple(cost() for _ in range(layers)),
        hosts=tuple(
            StageHost(
                source.randint(total // 3, 2 * total),
                source.choice([1, 1, 2, 3]),
                source.choice([0, 0, 1]),
            )
            for _ in range(stages)
        ),
        couplings=Couplings(tuple(couplings), known=True, evidence="random"),
        first=cost(),
        last=cost(),
        tokens=source.choice([0, 0, 1, high]),
    )


def all_legal(problem: Problem) -> Iterator[Partition]:
    """Every legal partition, fitting or not."""
    layers = len(problem.layers)
    for cuts in combinations(range(1, layers), len(problem.hosts) - 1):
        if any(
            coupling.source < cut <= coupling.last
            for cut in cuts
            for coupling in problem.couplings.items
        ):
            continue
        yield evaluate(problem, [end - begin for begin, end in pairwise([0, *cuts, layers])])


def objective(partition: Partition) -> tuple[object, ...]:
    """The order of the module's docstring: smaller is better."""
    return (
        partition.time,
        -partition.tokens,
        sum(stage.time**2 for stage in partition.stages),
        tuple(-count for count in partition.counts),
    )


@pytest.mark.parametrize("seed", range(40))
def test_optimal_against_brute_force(seed: int) -> None:
    source = random.Random(seed)  # fixed seeds: 40 x 50 problems, the same on every run
    for _ in range(50):
        problem = random_problem(source)
        legal = list(all_legal(problem))
        fitting = [option for option in legal if option.tokens >= max(0, problem.tokens)]
        if not legal:
            with pytest.raises(ConfigurationError, match="stages"):
                best_partition(problem)
            continue
        if not fitting:
            with pytest.raises(Refused):
                best_partition(problem)
            assert most_tokens(problem) == max(option.tokens for option in legal)
            continue
        chosen = best_partition(problem)
        assert chosen == min(fitting, key=objective)
        assert sum(chosen.counts) == len(problem.layers)
        assert check_partition(chosen.counts, len(problem.layers), problem.couplings) == ()
        assert most_tokens(problem) == max(option.tokens for option in legal)


def test_evaluate_adds_up_by_hand() -> None:
    problem = Problem(
        layers=(Cost(1, 10, 2), Cost(2, 20, 2), Cost(3, 30, 0)),
        hosts=(StageHost(50), StageHost(100, slowness=2)),
        couplings=FREE,
        first=Cost(memory=5),
        last=Cost(time=7, memory=9, cache=4),
    )
    one, two = evaluate(problem, [1, 2]).stages
    assert (one.first, one.last, one.time, one.memory, one.tokens) == (0, 0, 1, 15, 35 // 2)
    assert (two.first, two.last, two.time, two.memory, two.tokens) == (1, 2, 24, 59, 41 // 6)


def test_a_stage_that_keeps_nothing_per_token() -> None:
    problem = Problem((Cost(1, 1, 0), Cost(1, 1, 1)), (StageHost(9), StageHost(9)), FREE)
    chosen = best_partition(problem)
    assert chosen.stages[0].tokens == UNLIMITED
    assert chosen.tokens == 8


def test_glm_5_2_over_two_stages() -> None:
    problem = partition_problem(GLM, replace(MTP, max_model_len=131072), [H100] * 2)
    chosen = best_partition(problem)
    assert chosen.counts == (42, 36)
    other = evaluate(problem, (38, 40))
    assert chosen.time < other.time
    assert chosen.tokens > other.tokens


@pytest.mark.parametrize("requests", [4, 8, 16, 64])
@pytest.mark.parametrize("context", [1024, 131072])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_glm_5_2_over_two_stages_whatever_the_workload(
    requests: int, context: int, drafts: int
) -> None:
    # One request alone fills no pipeline: how its layers are cut makes no difference then.
    serving = Serving(tensor=8, drafts=drafts, cache_type="fp8")
    problem = partition_problem(
        GLM, serving, [H100] * 2, workload=Workload(requests=requests, context=context)
    )
    assert best_partition(problem).counts in {(42, 36), (38, 40)}


def test_39_39_is_refused_with_layer_group_and_way_out() -> None:
    with pytest.raises(Refused) as refused:
        refuse_illegal((39, 39), 78, GLM.couplings)
    assert "stage 1 would begin at layer 39, inside layers 38 to 41" in refused.value.message
    assert "indices of layer 38" in refused.value.message
    assert "38 or 42" in refused.value.message
    assert refused.value.hint == "use 38/40 or 42/36, or auto"
    refuse_illegal((38, 40), 78, GLM.couplings)
    refuse_illegal((42, 36), 78, GLM.couplings)


def test_every_illegal_cut_is_named() -> None:
    with pytest.raises(Refused) as refused:
        refuse_illegal((13, 13, 13, 39), 78, GLM.couplings)
    assert "layer 13" in refused.value.message
    assert [detail.split(",")[0] for detail in refused.value.details] == [
        "stage 3 would begin at layer 39"
    ]


@pytest.mark.parametrize("counts", [(39, 38), (78, 0), (79, -1), (0, 78)])
def test_counts_that_are_no_partition(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="78"):
        check_partition(counts, 78, GLM.couplings)


def test_nearest_legal_when_cuts_would_meet() -> None:
    # Layers 3 and 5 both lie in the group 2 to 5: both move down to 2, or up to 6.
    assert nearest_legal((3, 2, 73), 78, GLM.couplings) == ()
    assert nearest_legal((1, 2, 75), 78, GLM.couplings) == ((1, 1, 76), (1, 5, 72))


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        # By hand from get_pp_indices: the remainder to the stages before the last.
        (78, 2, (39, 39)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (78, 4, (19, 20, 20, 19)),
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
        (5, 5, (1, 1, 1, 1, 1)),
        (7, 1, (7,)),
    ],
)
def test_vllm_default(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert vllm_default(layers, stages) == counts


def test_explanation_names_vllms_own_cut() -> None:
    problem = partition_problem(GLM, MTP, [H100] * 2)
    said = "\n".join(explain(problem, best_partition(problem)))
    assert "42/36" in said
    assert "vLLM's own cut 39/39 is illegal: stage 1 would begin at layer 39" in said
    assert "21 of 78 layers" in said


def test_explanation_compares_a_legal_default() -> None:
    problem = Problem((Cost(4, 1), Cost(1, 1), Cost(1, 1), Cost(1, 1)), (StageHost(9),) * 2, FREE)
    said = explain(problem, best_partition(problem))
    assert said[-2].startswith("vLLM's own cut 2/2 is legal")
    assert said[-1] == "its slowest stage takes +25.0% time"


def test_explanation_admits_unknown_couplings() -> None:
    unknown = Couplings((), known=False, evidence="nobody looked")
    problem = Problem((Cost(1, 1),) * 2, (StageHost(9),) * 2, unknown)
    assert any("nobody looked" in line for line in explain(problem, best_partition(problem)))


def test_too_many_stages() -> None:
    with pytest.raises(ConfigurationError, match="22 stages, but only 21 layers"):
        best_partition(partition_problem(GLM, MTP, [H100] * 22))


@pytest.mark.parametrize("release", ["0.30.0", "0.32.0"])
def test_what_does_not_fit_is_refused_with_what_would(release: str) -> None:
    serving = replace(MTP, max_model_len=1_048_576, release=release)
    with pytest.raises(Refused, match="max-model-len 1048576 fits under no cut") as refused:
        best_cut(GLM, serving, [H100] * 2)
    largest = largest_max_model_len(GLM, serving, [H100] * 2)
    assert largest is not None
    assert refused.value.hint == f"the largest that fits is {largest}"
    assert 600_000 < largest < 800_000
    fitting = best_cut(GLM, replace(serving, max_model_len=largest), [H100] * 2)
    assert fitting.tokens >= largest
    with pytest.raises(Refused):
        best_cut(GLM, replace(serving, max_model_len=largest + 1), [H100] * 2)


def test_weights_that_fit_nowhere() -> None:
    with pytest.raises(Refused, match="fits the weights"):
        best_cut(GLM, MTP, [Gpu(40 * GIB)] * 2)
    assert largest_max_model_len(GLM, MTP, [Gpu(40 * GIB)] * 2) == 0


def test_the_native_context_is_the_most_there_is() -> None:
    assert largest_max_model_len(GLM, MTP, [Gpu(141 * GIB)] * 2) == 1_048_576


def test_the_larger_host_takes_more_layers() -> None:
    big = Gpu(141 * GIB)
    even = best_partition(partition_problem(GLM, MTP, [H100, H100]))
    first = best_cut(GLM, replace(MTP, max_model_len=131072), [big, Gpu(54 * GIB)])
    assert first.counts[0] > even.counts[0]
    assert first.tokens >= 131072


def test_the_slower_host_takes_fewer_layers() -> None:
    slow_last = partition_problem(GLM, MTP, [H100] * 2, slowness=[10, 12])
    assert best_partition(slow_last).counts == (46, 32)


def test_partitions_in_words() -> None:
    assert in_words((42, 36)) == "42/36"
    assert in_words((2,) * 28 + (1,) * 36) == "28 stages of 2, 36 of 1"
    assert in_words((6,) + (4,) * 18) == "1 stage of 6, 18 of 4"


def test_64_stages_in_under_a_second() -> None:
    # 128 layers in groups of two, each of another cost: the largest shape asked for.
    source = random.Random(64)
    layers = tuple(
        Cost(source.randint(900, 1100), source.randint(900, 1100), 5) for _ in range(128)
    )
    groups = tuple(Coupling(layer, layer + 1, "a pair") for layer in range(0, 32, 2))
    problem = Problem(
        layers,
        tuple(StageHost(source.randint(5000, 9000)) for _ in range(64)),
        Couplings(groups, known=True, evidence="pairs"),
        first=Cost(100, 500, 0),
        last=Cost(800, 900, 5),
    )
    began = time.perf_counter()
    chosen = best_partition(problem)
    took = time.perf_counter() - began
    assert took < 1.0
    assert list(accumulate(chosen.counts))[-1] == 128
    assert check_partition(chosen.counts, 128, problem.couplings) == ()


def test_equal_input_gives_equal_output() -> None:
    problem = Problem((Cost(1, 1, 1),) * 7, (StageHost(99),) * 3, FREE)
    assert best_partition(problem).counts == (3, 2, 2)
    assert best_partition(problem) == best_partition(problem)
