"""What a stage hands over, in a real engine of vLLM's NVIDIA class of GLM-5.2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from stage_evidence import (  # noqa: E402
    WORLDS,
    boundary_problems,
    environment,
    serve_boundary,
)

RELEASE = "0.32.0"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Python = Callable[[str], Path]


def test_a_stage_hands_over_shares_and_with_the_patch_their_sum(
    vllm_python: Python, tmp_path: Path
) -> None:
    """In bfloat16, with MTP and beside no stages: patches/evidence/0.32.0-stages.json."""
    cases = ("unpatched", "patched")
    runs = serve_boundary(vllm_python(RELEASE), "float32", tmp_path, *cases)
    assert [*boundary_problems("float32", runs, cases)] == []


def test_its_operators_in_torch_are_the_kernels(vllm_python: Python, tmp_path: Path) -> None:
    """No more differs than the order of a sum, and how Triton's interpreter rounds: to bfloat16 it
    cuts off, to float8 it rounds ties up, and where that reaches the next power of two it loses the
    carry."""
    done = subprocess.run(
        [vllm_python(RELEASE), WORLDS / "operators_world.py"],
        env={**os.environ, **environment(["mtppp_gpu_classes", "mtppp_cpu"], tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=800,
        check=True,
    )
    exact, rounded = [json.loads(line) for line in done.stdout.splitlines() if line[0] == "{"]
    assert (exact.pop("dtype"), rounded.pop("dtype")) == ("torch.float32", "torch.bfloat16")
    assert len(exact) == len(rounded) == 11
    assert max(exact.values()) < 1e-6
    for name, difference in rounded.items():
        assert difference < (2**-4 if name in {"keys", "index_q"} else 2**-7), name
