from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtppp.cli.plan_words import duration, time_lines
from mtppp.model.facts import read_facts
from mtppp.plan.report import report

sys.path.insert(0, str(Path(__file__).resolve().parent))
from clusters import GLM, reviewed

EMBEDDING = 154880 * 6144 * 2


def test_every_weight_is_read_once_and_the_embedding_for_the_drafter_again() -> None:
    assert GLM.checkpoint_bytes is not None
    reads = reviewed().times.reads
    assert sum(reads) == GLM.checkpoint_bytes + EMBEDDING
    without = reviewed(speculative=None, parallel={"tensor": 8, "pipeline": 2}).times.reads
    mtp = GLM.checkpoint_bytes - sum(without)
    # 9.95 B parameters, most of them a byte each.
    assert mtp == pytest.approx(9.95e9, rel=0.03)


def test_a_stage_over_several_nodes_is_read_on_each() -> None:
    both = reviewed(parallel={"tensor": 16, "pipeline": 1}).times.reads
    assert len(both) == 2
    assert both[0] == both[1] == GLM.checkpoint_bytes


def test_the_slowest_node_counts_and_rates_are_said_to_be_assumed() -> None:
    result = reviewed(serve={"args": {"max-model-len": 131072}, "stall_timeout": 77})
    times = result.times
    assert times.from_disk == max(times.reads) / 3e9
    [weights, given_up, unknown] = time_lines(result)
    assert weights.startswith("weights to read: 36")
    assert "About 2 min from a disk of 3 GB/s, 5 min over a network" in weights
    assert "assumed, not measured" in weights
    assert "after 77 s without a new line" in given_up
    assert "tokens per second" in unknown
    assert report(result)["times"]["reads"] == times.reads


def test_without_the_model_s_sizes_only_what_is_known_is_said() -> None:
    model = read_facts({"model_type": "new_family", "num_hidden_layers": 8})
    result = reviewed(model, parallel={"tensor": 16, "pipeline": 1}, speculative=None)
    assert result.times.reads == ()
    assert len(list(time_lines(result))) == 2


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "1 s"), (40, "40 s"), (150, "2 min")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
