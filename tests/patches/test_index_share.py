"""Stages that would attend with another stage's indices: which they are, and that none starts."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtppp_patches.engine_spec import DEPLOYMENT_VARIABLE, SPEC_VARIABLE, EngineSpec
from mtppp_patches.index_share import layers_read, stage_starts, why_not
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

PACKAGES = Path(__file__).resolve().parents[2] / "patches"

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


# Runs under a release's python: vLLM's own rules, evaluated for the same configs.
VLLM_RULES = """
import ast, json, sys, types
from importlib.util import find_spec
from pathlib import Path

root = Path(find_spec("vllm").origin).parent

def defined(path, *names):
    tree = ast.parse((root / path).read_text())
    nodes = [n for n in tree.body if getattr(n, "name", "") in names]
    space = {"PreTrainedConfig": object, "PretrainedConfig": object}
    exec(compile(ast.Module(nodes, []), path, "exec"), space)
    return [space[name] for name in names]

def deciding_statements(path):
    tree = ast.parse((root / path).read_text())
    [attention] = [n for n in tree.body if getattr(n, "name", "") == "DeepseekV32Attention"]
    [init] = [n for n in attention.body if getattr(n, "name", "") == "__init__"]
    def sets(node):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)
                and isinstance(n.ctx, ast.Store)}
    decide = {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "skip_topk"}
    nodes = [n for n in init.body if sets(n) & decide]
    assert len(nodes) == 4, nodes
    return compile(ast.Module(nodes, []), path, "exec")

rule = deciding_statements("models/deepseek_v32/attention.py")
[shared_of_hy] = defined("models/hy_v4/nvidia/attention.py", "compute_skip_topk_layers")
*_, skips_of_minimax = defined(
    "models/minimax_m3/amd/model.py", "_sparse_attention_layer_ids",
    "_sparse_attention_layer_ordinals", "_should_skip_index_topk")

def skips(config, layer):
    if config.model_type == "hy_v4":
        return layer in shared_of_hy(config)
    if config.model_type == "minimax_m3_text":
        return skips_of_minimax(config, layer)
    space = {"config": config, "layer_id": layer}
    exec(rule, space)
    return space["skip_topk"]

configs = [types.SimpleNamespace(**config) for config in json.load(sys.stdin)]
print(json.dumps([[n for n in range(c.num_hidden_layers) if skips(c, n)] for c in configs]))
"""


@pytest.mark.vllm
@pytest.mark.parametrize("release", ["0.29.0", "0.32.0"])
def test_the_rules_are_vllms(release: str, vllm_python: Callable[[str], Path]) -> None:
    numbers = random.Random(1)
    configs: list[dict[str, Any]] = [GLM]
    for _ in range(30):
        layers = numbers.randint(2, 20)
        schedule = {
            "num_hidden_layers": layers,
            "index_topk": 8,
            "index_topk_freq": numbers.randint(1, 5),
            "index_skip_topk_offset": numbers.randint(0, 4),
        }
        kinds = ["full", *numbers.choices(["full", "shared"], k=layers - 1)]
        frequencies = numbers.choices([0, 1], k=layers)
        configs += [
            {**schedule, "model_type": "glm_moe_dsa", "index_topk_pattern": None},
            {
                **schedule,
                "model_type": "hy_v4",
                "indexer_types": kinds,
                "layer_types": ["sparse"] * layers,
            },
            {
                **schedule,
                "model_type": "minimax_m3_text",
                "use_index_cache": True,
                "sparse_attention_config": {"sparse_attention_freq": frequencies},
            },
        ]
    done = subprocess.run(
        [vllm_python(release), "-c", VLLM_RULES],
        input=json.dumps(configs),
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    for config, shared in zip(configs, answers, strict=True):
        read = layers_read(config)
        mine = [layer for layer, source in enumerate(read) if source != layer]
        # A layer that shares before any computed has nothing to lose by a cut.
        assert mine == [n for n in shared if n > min(set(range(78)) - set(shared))], config


# Runs under a release's python: real configuration, EngineCore and worker wrapper, patched.
ENGINE = """
import json, os, sys
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from mtppp_patches.patch import PatchError
from mtppp_patches.plugin import register

class Started(Exception):
    pass

def executor(vllm_config):
    raise Started

def outcome(start):
    try:
        start()
    except PatchError as error:
        return str(error)
    except Started:
        pass
    return "starts"

register()
config = EngineArgs(
    sys.argv[1], skip_tokenizer_init=True, pipeline_parallel_size=2, max_model_len=64,
    dtype="bfloat16", distributed_executor_backend="mp",
).create_engine_config()
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerWrapperBase

def outcomes():
    yield outcome(lambda: EngineCore(config, executor, log_stats=False))
    for stage in range(2):
        parallel_state._PP = type("Group", (), {"rank_in_group": stage})
        wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
        wrapper.vllm_config = config
        wrapper.worker = type("Worker", (), {"init_device": lambda self: None})()
        yield outcome(wrapper.init_device)

print(json.dumps(list(outcomes())))
for partition in ("40,38", "42,36"):
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    print(json.dumps(list(outcomes())))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.vllm
def test_engine_and_worker_refuse_whoever_set_the_partition(
    tmp_path: Path, vllm_python: Callable[[str], Path]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **GLM,
                "architectures": ["GlmMoeDsaForCausalLM"],
                "first_k_dense_replace": 3,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
            }
        )
    )
    spec = EngineSpec("0.32.0", "glm_moe_dsa", device="cpu", pipeline=2)
    spec = replace(spec, patches=names_needed(PATCHES, spec))
    done = subprocess.run(
        [vllm_python("0.32.0"), "-c", ENGINE, tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGES),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            DEPLOYMENT_VARIABLE: "test",
            SPEC_VARIABLE: spec.to_json(),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    default, illegal, legal = map(json.loads, done.stdout.splitlines()[-3:])
    for outcomes, layer, source in ((default, 39, 38), (illegal, 40, 38)):
        engine, first, second = outcomes
        assert first == "starts"
        assert engine == second
        assert f"layer {layer} attends with indices that layer {source} computes" in engine
    assert legal == ["starts"] * 3
