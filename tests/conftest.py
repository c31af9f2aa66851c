"""Fixtures for all tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# A shell that starts the tests in the background has them ignore Ctrl-C, and every process they
# start with them; the tests that send it mean it to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ENVIRONMENT = Path(__file__).resolve().parent.parent / "scripts" / "environment"


@cache
def environment(release: str) -> Path:
    """The python of a vLLM environment, made if it is missing."""
    made = subprocess.run(
        [sys.executable, str(ENVIRONMENT), release], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def vllm_python() -> Callable[[str], Path]:
    """`vllm_python("0.32.0")`: the python of that release's environment for CPU hosts."""
    return environment
