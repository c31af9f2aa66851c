"""Logs on a node: kept bounded while they are written, and read in pieces."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from agents import answer, kill, start, wait_for

# Writes more than the bound, waits until that is cut off, and writes on.
FLOOD = """
import os, sys, time
sys.stdout.write(("x" * 99 + "\\n") * 700_000)
sys.stdout.flush()
while os.path.getsize("test.log") > 1000:
    time.sleep(0.01)
print("after")
time.sleep(600)
"""
RAY = "2026-11-29 15:32:01,429\tINFO worker.py:1691 -- Using address 127.0.1.1:26300"
VLLM = "(Worker_PP1 pid=7) INFO 11-29 15:32:19 [model_runner.py:392] Loading model from scratch..."
TORCH = "[W1129 15:32:18.765188468 utils.cpp:68] Warning: NUMA binding"


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


@pytest.fixture
def directory(run_directory: str) -> str:
    answer("write", directory=run_directory, files=[])
    return run_directory


@pytest.fixture
def ray_directory(directory: str) -> str:
    return f"{directory}/ray"


def read(directory: str, ray_directory: str, **request: Any) -> dict[str, Any]:
    request = {"names": ["server.log"], "since": 0, "limit": 1 << 20, "positions": {}} | request
    read: dict[str, Any] = answer(
        "logs", directory=directory, ray_directory=ray_directory, **request
    )
    return read


def texts(answered: dict[str, Any]) -> list[str]:
    return [text for log in answered["logs"] for _, text in log["lines"]]


def test_a_log_that_grows_too_long_is_cut_off(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = uuid4().hex
    monkeypatch.setenv("MTPPP_TEST_TRACE", trace)
    entry = start(directory, FLOOD)
    try:
        log, older = Path(directory, "test.log"), Path(directory, "test.log.1")
        wait_for(lambda: older.exists() and log.read_bytes() == b"after\n", "the cut")
        assert older.stat().st_size == 70_000_000
        assert _with_trace(trace), "nobody keeps the log bounded any more"
    finally:
        kill(entry["pid"])
    wait_for(lambda: not _with_trace(trace), "the end of who kept the log bounded")


def _with_trace(trace: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if trace.encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return [pid for pid in found if int(pid) != os.getpid()]


def test_lines_have_times_as_far_as_they_are_known(directory: str, ray_directory: str) -> None:
    log = Path(directory, "server.log")
    log.write_text(f"first\n{RAY}\n{TORCH}\n{VLLM}\n  File x\n\n\x1b[36mred\x1b[0m\n")
    os.utime(log, (at("2026-12-01 00:00:00"),) * 2)
    [entry] = read(directory, ray_directory)["logs"]
    assert entry["left_out"] == 0
    assert entry["lines"] == [
        [at("2026-11-29 15:32:01") + 0.429, "first"],
        [at("2026-11-29 15:32:01") + 0.429, RAY],
        [pytest.approx(at("2026-11-29 15:32:18") + 0.765188468), TORCH],
        [at("2026-11-29 15:32:19"), VLLM],
        [at("2026-11-29 15:32:19"), "  File x"],
        [at("2026-11-29 15:32:19"), "red"],
    ]
    since = at("2026-11-29 15:32:19")
    assert texts(read(directory, ray_directory, since=since)) == [VLLM, "  File x", "red"]


def test_a_line_of_last_year(directory: str, ray_directory: str) -> None:
    log = Path(directory, "server.log")
    log.write_text("INFO 12-31 23:59:59 [a.py:1] old\nINFO 01-01 00:00:00 [a.py:1] new\n")
    os.utime(log, (at("2027-01-01 00:00:01"),) * 2)
    [entry] = read(directory, ray_directory)["logs"]
    assert [stamp for stamp, _ in entry["lines"]] == [
        at("2026-12-31 23:59:59"),
        at("2027-01-01 00:00:00"),
    ]


def test_only_the_end_of_a_progress_bar(directory: str, ray_directory: str) -> None:
    Path(directory, "server.log").write_bytes(b"\rshards: 0/2\rshards: 1/2\rshards: 2/2\r\nup\n")
    assert texts(read(directory, ray_directory)) == ["shards: 2/2", "up"]


def test_following(directory: str, ray_directory: str) -> None:
    log, older = Path(directory, "server.log"), Path(directory, "server.log.1")
    positions: dict[str, Any] = {"no.log": [0, 0]}

    def news() -> list[str]:
        answered = read(directory, ray_directory, positions=positions)
        positions.update(answered["positions"])
        return texts(answered)

    log.write_text("one\ntw")
    assert news() == ["one"]
    with log.open("a") as writing:
        writing.write("o\nthree\n")
    assert news() == ["two", "three"]
    assert news() == []
    # Cut off, as the agent does it.
    with log.open("a") as writing:
        writing.write("four\n")
    older.write_text(log.read_text())
    os.truncate(log, 0)
    with log.open("a") as writing:
        writing.write("five\n")
    assert news() == ["four", "five"]
    # Another launch.
    log.rename(f"{log}.before")
    log.write_text("six, of another launch\n")
    assert news() == ["six, of another launch"]


def test_of_a_long_log_the_end(directory: str, ray_directory: str) -> None:
    Path(directory, "server.log.1").write_text("before\n")
    Path(directory, "server.log").write_text("after\n")
    assert texts(read(directory, ray_directory)) == ["before", "after"]
    [entry] = read(directory, ray_directory, limit=6)["logs"]
    assert [text for _, text in entry["lines"]] == ["after"]
    assert entry["left_out"] == 7


def test_workers_of_what_runs_before_those_of_an_earlier_launch(
    directory: str, ray_directory: str
) -> None:
    kept = Path(directory, "ray-logs")
    kept.mkdir(parents=True)
    (kept / "worker-a-1.out").write_text("earlier\n")
    assert texts(read(directory, ray_directory)) == ["earlier"]
    running = Path(ray_directory, "session_2026-11-29", "logs")
    running.mkdir(parents=True)
    (running / "worker-b-2.out").write_text("now\n")
    (running / "worker-b-2.out.1").write_text("just before\n")
    (running / "raylet.out").write_text("not of a worker\n")
    assert texts(read(directory, ray_directory)) == ["just before", "now"]
