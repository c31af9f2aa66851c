"""Sparse latent attention on CPU hosts: what it computes, alone and in an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORLDS = ROOT / "tests/patches"
MODEL = ROOT / "cluster_configs/models/demo-glm-moe-dsa"
sys.path.append(str(ROOT / "scripts"))

from cpu_engine import engine_environment  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Python = Callable[[str], Path]


def lines(*command: str | Path) -> list[dict[str, Any]]:
    """What a world prints."""
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=800,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_pages_change_nothing(vllm_python: Python) -> None:
    """Equal to the attention over all positions, or over those with the best scores."""
    chosen, all_seen = lines(vllm_python("0.32.0"), WORLDS / "sparse_world.py")
    assert 0 < chosen["short_rows"] < chosen["rows"]
    assert all_seen["short_rows"] == all_seen["rows"]
    for found in (chosen, all_seen):
        assert found["other_rows"] == 0
        assert found["error"] < 1e-5
        assert found["nothing"] == 0


@pytest.mark.parametrize("release", ["0.29.0", "0.32.0"])
def test_an_engine_computes_what_transformers_does(
    release: str, vllm_python: Python, tmp_path: Path
) -> None:
    top = 64  # the model's own
    result = tmp_path / "result.json"
    subprocess.run(
        [vllm_python(release), WORLDS / "sparse_engine_world.py", MODEL, str(top), result],
        env={
            **os.environ,
            **engine_environment(["mtppp_cpu"], tmp_path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        timeout=800,
        check=True,
    )
    engine = json.loads(result.read_text())
    assert engine["accepted"] > 10
    assert engine["prefix_hits"] > 0
    reference = WORLDS / "sparse_reference_world.py"
    [found] = lines(vllm_python("0.32.0"), reference, MODEL, str(top), result)
    print(release, found)
    assert found["prompt_tokens"] > 300
    assert found["new_tokens"] > 90
    assert found["largest_difference"] < 1e-2
    assert found["largest_gap"] < 1e-2
    assert found["without_choosing"] > 0.5
