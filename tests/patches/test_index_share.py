"""Stages that would attend with another stage's indices: which they are, and that none starts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtppp_patches.index_share import stage_starts, why_not

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from class_evidence import index_problems, run

GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
}


def test_stages_of_glm_5_2() -> None:
    assert stage_starts(GLM) == (0, 1, 2, *range(6, 78, 4))
    assert why_not(GLM, 0, 42) is None
    assert why_not(GLM, 42, 78) is None


def test_vllms_own_split_of_glm_5_2_is_refused_with_the_way_out() -> None:
    assert why_not(GLM, 0, 39) is None
    reason = why_not(GLM, 39, 78)
    assert reason is not None
    assert "layer 39 attends with indices that layer 38 computes" in reason
    assert "begins at layer 38 or 42" in reason


def test_behind_the_last_start_only_the_one_below_is_named() -> None:
    reason = why_not(GLM, 77, 78)
    assert reason is not None
    assert reason.endswith("begins at layer 74")


@pytest.mark.parametrize(
    ("config", "starts"),
    [
        ({"model_type": "glm4_moe", "num_hidden_layers": 4}, (0, 1, 2, 3)),
        # Sparse attention, every layer with an indexer of its own.
        ({"model_type": "deepseek_v32", "num_hidden_layers": 4, "index_topk": 8}, (0, 1, 2, 3)),
        ({**GLM, "num_hidden_layers": 6, "index_topk_pattern": "FFSFSS"}, (0, 1, 3)),
        ({**GLM, "num_hidden_layers": 6, "index_topk_pattern": "FS"}, (0, 2, 3, 4, 5)),
        # vLLM does not look at it for this family.
        ({**GLM, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"]}, (0, 1, 2)),
        # Layers with a sliding window use no indices.
        (
            {
                "model_type": "dots3_note",
                "num_hidden_layers": 6,
                "index_topk": 8,
                "index_topk_pattern": "FSSSSF",
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
            (0, 5),
        ),
        (
            {
                "model_type": "hy_v4",
                "num_hidden_layers": 6,
                "index_topk": 8,
                "layer_types": ["sparse_attention"] * 6,
            },
            (0, 1, 5),
        ),
        (
            {
                "model_type": "hy_v4",
                "num_hidden_layers": 4,
                "index_topk": 8,
                "indexer_types": ["full", "shared", "full", "shared"],
                "layer_types": ["sparse", "full_attention", "sparse", "indexed_attention"],
            },
            (0, 1, 2),
        ),
        (
            {
                "model_type": "minimax_m3_text",
                "num_hidden_layers": 6,
                "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 0, 1, 1]},
                "use_index_cache": True,
                "index_topk_freq": 2,
            },
            (0, 1, 3, 4),
        ),
        (
            {
                "model_type": "minimax_m3_text",
                "num_hidden_layers": 3,
                "sparse_attention_config": {"sparse_attention_freq": [1, 1, 1]},
                "index_topk_freq": 2,
            },
            (0, 1, 2),
        ),
        # Compressed KV of 1, indices of 1 and 4, candidates of 1 for the indexer of 4.
        (
            {
                "model_type": "deepseek_v41",
                "num_hidden_layers": 7,
                "compress_ratios": [0, 1, 1, 1, 1, 0, 0],
                "kv_source_layer_ids": [1],
                "index_source_layer_ids": [1, 4],
                "candidate_source_layer_id": 1,
                "candidate_topk_blocks": 8,
            },
            (0, 1, 5, 6),
        ),
        (
            {
                "model_type": "deepseek_v41",
                "num_hidden_layers": 5,
                "compress_ratios": [1, 1, 1, 1, 0],
                "kv_source_layer_ids": [0, 2],
                "index_source_layer_ids": [0, 2],
                "candidate_source_layer_id": 0,
                "candidate_topk_blocks": 8,
            },
            (0, 4),
        ),
    ],
)
def test_stage_starts(config: dict[str, Any], starts: tuple[int, ...]) -> None:
    assert stage_starts(config) == starts


def test_a_partition_is_refused_exactly_if_a_stage_reads_what_it_has_not_written() -> None:
    numbers = random.Random(0)
    seen = set()
    for _ in range(500):
        layers = numbers.randint(2, 12)
        pattern = "F" + "".join(numbers.choices("FS", k=layers - 1))
        config = {**GLM, "num_hidden_layers": layers, "index_topk_pattern": pattern}
        cuts = sorted(numbers.sample(range(1, layers), numbers.randint(1, min(3, layers - 1))))
        right = True
        for start, end in pairwise([0, *cuts, layers]):
            buffer_written = False
            for layer in range(start, end):
                buffer_written = buffer_written or pattern[layer] == "F"
                right = right and buffer_written
        allowed = all(
            why_not(config, start, end) is None for start, end in pairwise([0, *cuts, layers])
        )
        assert allowed is right, (pattern, cuts)
        assert allowed is set(cuts).issubset(stage_starts(config)), (pattern, cuts)
        seen.add(right)
    assert seen == {True, False}


@pytest.mark.vllm
@pytest.mark.parametrize("release", ["0.29.0", "0.32.0"])
def test_the_rules_are_vllms_and_engine_and_workers_refuse_whoever_cut(
    release: str, vllm_python: Callable[[str], Path]
) -> None:
    runs = run(vllm_python(release), "index_world.py")
    assert [*index_problems(runs)] == []
    assert {"glm_moe_dsa", "hy_v4", "minimax_m3_text"} == {
        entry["family"] for entry in runs if entry["experiment"] == "rules"
    }
    default, illegal, *legal = [entry for entry in runs if entry["experiment"] == "refusals"]
    assert "layer 39 attends with indices that layer 38 computes" in default["engine"]
    assert "layer 40 attends with indices that layer 38 computes" in illegal["engine"]
    assert [entry["engine"] for entry in legal] == ["starts", "starts"]
