"""What is shown to vLLM's maintainers: with vLLM alone, as docs/upstream says."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).resolve().parents[2] / "docs/upstream"
# That both faults are in 0.29.0 as well, test_stage_boundary and test_index_share show.
RELEASE = "0.32.0"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def printed(python: Path, script: str) -> str:
    done = subprocess.run(
        [python, DIRECTORY / script],
        env={name: os.environ[name] for name in ("PATH", "HOME")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=True,
    )
    return done.stdout


def test_a_stage_hands_over_shares(vllm_python: Callable[[str], Path]) -> None:
    lines = re.findall(
        r"^(TP.*): relative error (\S+)$",
        printed(vllm_python(RELEASE), "stage_boundary.py"),
        re.MULTILINE,
    )
    errors = {layout: float(error) for layout, error in lines}
    assert errors.pop("TP2 x PP2") > 0.1
    assert set(errors) == {"TP2 x PP1", "TP1 x PP2", "TP2 x PP2, mended"}
    assert max(errors.values()) < 1e-5


def test_a_stage_begins_without_an_indexer(vllm_python: Callable[[str], Path]) -> None:
    lines = re.findall(
        r"^stages (\d,\d).* error (\S+) in the first step, (\S+) in the second; (\d+) positions",
        printed(vllm_python(RELEASE), "index_share_cut.py"),
        re.MULTILINE,
    )
    assert [cut for cut, *_ in lines] == ["6,6", "7,5"]
    (_, *legal), (_, *within) = lines
    assert max(map(float, legal)) == 0
    assert min(map(float, within)) > 0.01
