"""A stand-in for vLLM on the path, patched in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

PATCHES = Path(__file__).resolve().parents[2] / "patches"

ENGINE_SOURCE = '''
import functools


def decorated(function):
    return function


class Engine:
    """Runs."""

    def step(self, n):
        # one step
        return n + 1

    @staticmethod
    def twice(n):
        return 2 * n


def helper():
    return "original"
'''


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """A package `vllm` 0.29.0+cpu with modules `engine` and `late`; returns its directory."""
    root = tmp_path / "site" / "vllm"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "version.py").write_text('__version__ = "0.29.0+cpu"\n')
    (root / "engine.py").write_text(ENGINE_SOURCE)
    (root / "late.py").write_text("from vllm.engine import Engine\n\n\ndef late():\n    return 1\n")
    return root


@pytest.fixture
def run_python(fake_vllm: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter that sees the fake vLLM and the patches package."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(fake_vllm.parent), str(PATCHES)])
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={"PYTHONPATH": path, "PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
