"""What is shown of real logs. They are excerpts of what vLLM 0.32.0 and Ray 2.60.0 wrote."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mtppp.phases.logs import (
    FailedRank,
    error_lines,
    failed_rank,
    latest_words,
    stage_of_start,
    telling_lines,
)

DATA = Path(__file__).parents[2] / "data"
AOT = (
    "RuntimeError: aot_compile is not supported by the current configuration. Please make sure"
    " torch.compile is enabled with the latest version of PyTorch (current using torch: 2.13.0+cpu)"
)
WORKER = (
    "(RayWorkerProc pid=7941) (Worker_PP0 pid=7941) ERROR 11-29 14:31:01"
    " [multiproc_executor.py:1063] "
)


def lines_of(name: str, count: int = 12) -> list[str]:
    return telling_lines((DATA / f"vllm-0.32.0-{name}.log").read_text(), count)


def test_a_port_that_is_taken() -> None:
    assert lines_of("port-taken") == ["OSError: [Errno 98] Address already in use"]


def test_a_model_that_is_not_there() -> None:
    assert lines_of("wrong-model")[-1] == (
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or"
        " 'namespace/repo_name': '/models/no-such-model'. Use `repo_type` argument if needed."
    )


def test_workers_that_failed_in_the_middle_of_each_others_tracebacks() -> None:
    assert lines_of("workers-failed") == [
        "(EngineCore pid=5387) ERROR 11-29 14:31:01 [core.py:1510] EngineCore failed to start.",
        "(EngineCore pid=5387) ERROR 11-29 14:31:01 [core.py:1510] RuntimeError: Worker failed with"
        " error 'aot_compile is not supported by the current configuration. Please make sure"
        " torch.compile is enabled with the latest version of PyTorch (current using torch:"
        " 2.13.0+cpu)', please check the stack trace a",
        f"{WORKER}WorkerProc hit an exception.",
        f"{WORKER}{AOT}",
        "RuntimeError: Engine core initialization failed. See root cause above."
        " Failed core proc(s): {}",
    ]


def test_of_a_rank_that_was_killed_no_line_of_what_came_of_it() -> None:
    last = [line.partition("[core.py:1510] ")[2] or line for line in lines_of("rank-killed")]
    assert [line[:60] for line in last] == [
        "EngineCore failed to start.",
        "ray.exceptions.ActorDiedError: The actor died unexpectedly b",
        "The actor is dead because its worker process has died. Worke",
        "RuntimeError: Engine core initialization failed. See root ca",
    ]


@pytest.mark.parametrize(
    ("name", "rank"), [("", 0), ("_PP1", 4), ("_TP3", 3), ("_TP3_PP1", 7), ("_TP3_PP1_PCP0", 7)]
)
def test_the_rank_that_was_killed(name: str, rank: int) -> None:
    log = (DATA / "vllm-0.32.0-rank-killed.log").read_text()
    actor = "vllm_Worker_1796047936332084774"
    assert failed_rank(log.replace(f"{actor}_PP1", f"{actor}{name}"), 4) == FailedRank(False, rank)


def test_of_a_rank_that_raised_an_exception_what_and_where() -> None:
    last = [line.partition("[core.py:1510] ")[2] or line for line in lines_of("rank-raised")]
    assert [line[:60] for line in last] == [
        "EngineCore failed to start.",
        "ray.exceptions.RayTaskError(SafetensorError): ray::RayWorker",
        "safetensors._safetensors_rust.SafetensorError: Error while d",
        "RuntimeError: Engine core initialization failed. See root ca",
    ]
    assert "(pid=142, ip=10.77.0.2," in last[1]
    log = (DATA / "vllm-0.32.0-rank-raised.log").read_text()
    assert failed_rank(log, 1) == FailedRank(True, None, "10.77.0.2", "142")


def test_what_a_rank_raises_because_another_was_killed_is_not_the_cause() -> None:
    raised = (DATA / "vllm-0.32.0-rank-raised.log").read_text()
    killed = (DATA / "vllm-0.32.0-rank-killed.log").read_text()
    [died] = [line for line in killed.splitlines() if "A worker died or was killed" in line]
    assert failed_rank(f"{raised}\n{killed}", 1) == FailedRank(False, 1)
    assert failed_rank(f"{raised}\n{died}", 1) == FailedRank(False, None, "10.77.1.2", "310")


def test_a_rank_that_ended_once_it_ran() -> None:
    ended = "RayWorkerProc rank=[3] died unexpectedly, shutting down executor."
    assert failed_rank(
        f"(EngineCore pid=7) ERROR 11-30 14:13:20 [a.py:1] {ended}\n", 4
    ) == FailedRank(False, 3)


@pytest.mark.parametrize("name", ["port-taken", "start", "workers-failed", "wrong-model"])
def test_where_no_rank_was_killed(name: str) -> None:
    assert failed_rank((DATA / f"vllm-0.32.0-{name}.log").read_text(), 4) is None


def test_when_there_are_too_many_the_first_and_the_last_are_shown() -> None:
    everything = lines_of("workers-failed")
    assert lines_of("workers-failed", 5) == everything
    assert lines_of("workers-failed", 3) == [everything[0], *everything[-2:]]
    assert lines_of("workers-failed", 1) == everything[:1]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n \n", []),
        ("one\n\ntwo\nthree\n", ["two", "three"]),
        ("\x1b[31mERROR\x1b[0m bad\n", ["ERROR bad"]),
        ("ERROR " + "x" * 400, ["ERROR " + "x" * 294]),
        # Shown by every load that takes a while.
        (
            "ERROR No available shared memory broadcast block found in 60 seconds.\nloading\n",
            ["ERROR No available shared memory broadcast block found in 60 seconds.", "loading"],
        ),
        # What is wrong stands below the name of pydantic's exception.
        (
            "Traceback (most recent call last):\n"
            '  File "x.py", line 1, in <module>\n'
            "    raise ValueError(\n"
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
            "  Value error, no such thing\n"
            "INFO done\n",
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, no such thing",
            ],
        ),
        # Cut off at its beginning.
        ("    call()\n  File 'y'\nKeyError: 'a'\n", ["KeyError: 'a'"]),
    ],
)
def test_lines(text: str, lines: list[str]) -> None:
    assert telling_lines(text, 2) == lines


def test_a_start_as_it_goes_on() -> None:
    lines = (DATA / "vllm-0.32.0-start.log").read_bytes().decode().splitlines(keepends=True)
    told = [stage_of_start("".join(lines[:count])) for count in range(1, len(lines) + 1)]
    assert list(dict.fromkeys(told)) == [
        "engine starts",
        "workers start",
        "weights: 0 of 1 files",
        "weights: 1 of 1 files",
        "weights loaded in 0.02 s",
        "KV cache: 209,696 tokens",
        "engine ready after 2.43 s",
        "server is up",
    ]
    words = [latest_words("".join(lines[:count])) for count in range(len(lines) + 1)]
    assert all(one != other for one, other in pairwise(words))


def test_waiting_for_a_peer_is_neither_progress_nor_an_error() -> None:
    log = (DATA / "vllm-0.32.0-start.log").read_text()
    waits = (
        "(EngineCore pid=23634) INFO 11-30 00:5{}:21 [shm_broadcast.py:733] No available shared"
        " memory broadcast block found in 60 seconds. This typically happens when some processes"
        " are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache"
        " quantization).\n"
    )
    waiting = log + "".join(waits.format(minute) for minute in (5, 6, 7))
    assert latest_words(waiting) == latest_words(log)
    assert stage_of_start(waiting) == stage_of_start(log)
    assert error_lines(waiting, 9) == []


def test_weights_of_the_slowest_rank() -> None:
    shards = (
        "(RayWorkerProc pid={}) Loading safetensors checkpoint shards:  {}% Completed | {}/8 [x]\n"
    )
    log = "".join(shards.format(*of) for of in ((7, 12, 1), (8, 12, 1), (7, 50, 4), (8, 25, 2)))
    assert stage_of_start(log) == "weights: 2 of 8 files, the slowest of 2 ranks"
    alone = "Loading safetensors checkpoint shards: 50% Completed | 4/8 [x]\n"
    assert stage_of_start(alone) == "weights: 4 of 8 files"
