"""The invariants of a deployment that `mtppp launch` made: what an operator sees of them.

Two nodes on this machine, real Ray, a real server; a fault is put in by a plugin of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mtppp_patches.observations import DRAFT_IDS, INVARIANTS, OWN_INDICES, SAME_STEP

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "0.32.0"
NAME = "watched"
URL = "http://127.0.7.1:8731"
COUNTER = "mtppp_invariant_{}_total"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def mtppp(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command; `faulty`: it also ships the plugin of faults."""

    def run(*arguments: str, faulty: bool = False) -> subprocess.CompletedProcess[str]:
        packages = [ROOT / "launcher", ROOT / "patches", ROOT / "tests/faults"]
        return subprocess.run(
            [sys.executable, "-m", "faulty_mtppp" if faulty else "mtppp", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": ":".join(map(str, packages)),
                "XDG_STATE_HOME": str(tmp_path / "state"),
            },
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    return run


@pytest.fixture
def cluster(tmp_path: Path, vllm_python: Callable[[str], Path]) -> Callable[..., Path]:
    """A file of two nodes on this machine; `changes` replace top-level keys."""

    def write(**changes: Any) -> Path:
        nodes = [
            {"host": f"watched-{i}", "address": f"127.0.7.{i}", "transport": "local", "gpus": 1}
            for i in (1, 2)
        ]
        content = {
            "name": NAME,
            "model": {
                "id": str(ROOT / "cluster_configs/models/demo-glm4-moe"),
                "served_name": NAME,
            },
            "nodes": nodes,
            "runtime": {"vllm": RELEASE, "python": str(vllm_python(RELEASE)), "device": "cpu"},
            "parallel": {"pipeline": 2},
            "speculative": {"tokens": 3},
            "ray": {"base_port": 27300},
            "serve": {
                "port": 8731,
                "args": {"max-model-len": 512, "max-num-seqs": 8, "dtype": "float32"},
            },
        } | changes
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


@contextmanager
def stopped_after(mtppp: Callable[..., Any], file: Path) -> Iterator[None]:
    try:
        yield
    finally:
        done = mtppp("stop", str(file))
        assert done.returncode == 0, done.stderr


def complete(number: int) -> None:
    """Ask for text.

    Raises:
        httpx.HTTPError: the server is gone, or its engine.
    """
    body = {"model": NAME, "prompt": f"count {number} by 4: {number} ", "max_tokens": 50}
    answer = httpx.post(f"{URL}/v1/completions", json=body | {"temperature": 0}, timeout=300)
    answer.raise_for_status()


def counters(kind: str) -> Mapping[str, float]:
    """A counter of the server's /metrics, by invariant."""
    found = {}
    for line in httpx.get(f"{URL}/metrics", timeout=60).text.splitlines():
        if line.startswith(COUNTER.format(kind)):
            label, _, value = line.rpartition(" ")
            found[label.partition('invariant="')[2].partition('"')[0]] = float(value)
    return found


def test_a_sound_deployment_counts_checks_and_no_violation(
    mtppp: Callable[..., Any], cluster: Callable[..., Path]
) -> None:
    file = cluster(invariants={"on_violation": "stop", "sample_every": 3})
    with stopped_after(mtppp, file):
        done = mtppp("launch", str(file))
        assert done.returncode == 0, done.stderr
        before = counters("checks")
        assert set(before) == set(INVARIANTS)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(complete, range(12)))
        checks, status = counters("checks"), mtppp("status", str(file), "--json")
        assert counters("violations") == dict.fromkeys(INVARIANTS, 0.0)
        assert checks[SAME_STEP] == checks[DRAFT_IDS] > before[SAME_STEP] + 3, (before, checks)
        assert checks[OWN_INDICES] == 0, "no layer of this model shares indices"

        ranks = json.loads(status.stdout)["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        for rank in ranks:
            watched = rank["patches"]["invariants"]
            assert any("execute_model" in target for target in watched["targets"]), watched
            assert rank["evidence"]["decode"]["level"] == "engine"
            assert rank["at_own_risk"] == []


def test_a_rank_that_runs_other_steps_shows_in_the_servers_metrics(
    mtppp: Callable[..., Any], cluster: Callable[..., Path]
) -> None:
    """That one ends an engine which is told so, `test_relay_faults.py` shows, and that an engine is
    told what the file says, `test_plan_build.py`."""
    sound = yaml.safe_load(cluster().read_text())
    # The last stage keeps the slots of requests whose end it does not hear: as many as there will
    # be, with those of the launch.
    arguments = {**sound["serve"]["args"], "max-num-seqs": 256}
    file = cluster(
        runtime={**sound["runtime"], "env": {"TEST_FAULT": "deaf_to_ends"}},
        serve={**sound["serve"], "args": arguments},
        invariants={"on_violation": "count", "sample_every": 1},
    )
    with stopped_after(mtppp, file):
        done = mtppp("launch", str(file), faulty=True)
        assert done.returncode == 0, done.stderr
        for number in range(3):
            complete(number)
        violations = counters("violations")
        assert violations[SAME_STEP] > 0
        assert violations == {**dict.fromkeys(INVARIANTS, 0.0), SAME_STEP: violations[SAME_STEP]}
        assert counters("checks")[SAME_STEP] >= violations[SAME_STEP]
        complete(3)
        [run_directory] = Path("/var/tmp").glob(f"mtppp-{os.getuid()}/{NAME}/0")
        log = (run_directory / "server.log").read_text()
    assert set(re.findall(r"invariant (\w+) does not hold in step", log)) == {SAME_STEP}
    assert "The ranks do not compute one model" not in log
