"""Engines of several kinds on CPU, one after the other, forked from one process.

Importing vLLM costs more than what these engines do, so it is imported once: each engine has a
process forked from that, and its workers are forked from it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.executor import multiproc_executor

TIMEOUT = 3000.0
"""Seconds that an engine may take."""


def fork_workers() -> None:
    """Have engines made from now on fork their workers; vLLM starts them anew on CPUs."""
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def in_a_process(
    case: Callable[[], Any], environment: Mapping[str, str], directory: Path
) -> Any | None:
    """What a case returns in a process of its own, through JSON; None if that ended before.

    Args:
        environment: variables that the process has beyond this one's.
        directory: of the engine, made here; `log` in it is what the process wrote.
    """
    directory.mkdir(parents=True)
    result = directory / "result.json"
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(case, environment, directory / "log", result)
    )
    process.start()
    leader = process.pid
    assert leader is not None
    process.join(TIMEOUT)
    # Its workers are of its session, and stay behind where it ends early.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    process.join()
    return json.loads(result.read_text(encoding="utf-8")) if result.exists() else None


def _run(case: Callable[[], Any], environment: Mapping[str, str], log: Path, result: Path) -> None:
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    fork_workers()
    value = case()
    written = result.with_suffix(".part")
    written.write_text(json.dumps(value), encoding="utf-8")
    written.rename(result)
