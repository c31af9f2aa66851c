"""A launch on a bad day: operators who go late, ranks that die or differ, harm to what serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployments import COMMAND, Server, cluster_file, mtppp
from harms import HARMS, HOSTS, WORKER, left, running_line, wait_until_told
from lab_driver import CHECKOUT, Lab
from strangers import HELD, assert_held, assert_served, statuses

sys.path.insert(0, str(Path(__file__).parents[1] / "launcher" / "verify"))

from replay import Replay

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

MODEL = "demo-glm4-moe"
PATIENCE = 900.0
"""Seconds for one launch; a busy machine takes minutes."""
SERVER_STARTED = "✓ server"
SCORING = "… self-score"


@pytest.fixture
def file_of(lab: Lab, tmp_path: Path, vllm_python: Callable[[str], Path]) -> Callable[..., Path]:
    def write(name: str, **changes: Any) -> Path:
        keys = {"name": name, "python": vllm_python("0.32.0")} | changes
        return cluster_file(tmp_path, lab, hosts=HOSTS, model=MODEL, **keys)

    return write


class Launch:
    """A launch that has come so far that it says something."""

    def __init__(self, file: Path, until: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "launch", str(file)], stderr=subprocess.PIPE, text=True
        )
        self.said = ""
        self.reads(until)

    def reads(self, until: str) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            if until in line:
                return
        pytest.fail(f"it never said {until!r}: {self.said}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit status, once it has ended."""
        _, said = self._process.communicate(timeout=PATIENCE)
        self.said += said
        return self._process.returncode


def status(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mtppp("status", name, "--json").stdout)
    return found


def test_from_interruption_to_interruption_from_harm_to_harm(
    lab: Lab, file_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deployment all along: what each step leaves is where the next begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "of-clients")
    file = file_of("harmed", secrets=["VLLM_API_KEY"])
    server = Server(f"http://{lab.hosts()['n1']['address']}:8000", MODEL, key="of-clients")

    # Once: what was started is stopped, late as it is.
    launch = Launch(file, SERVER_STARTED)
    launch.send(signal.SIGINT)
    assert launch.end() == 130
    assert "stopping what was started; interrupt once more to leave it as it is" in launch.said
    assert left(lab) == {}

    # Twice: it is left, and what is left can be named.
    launch = Launch(file, SERVER_STARTED)
    launch.send(signal.SIGINT)
    launch.reads("stopping what was started")
    launch.send(signal.SIGINT)
    assert launch.end() == 130
    assert "left as it is: `mtppp status harmed` says what runs" in launch.said
    assert status("harmed")["state"] == "starting"

    # The next goes on with it, and is killed without a word when only the scores are wanting.
    launch = Launch(file, SCORING)
    launch.send(signal.SIGKILL)
    assert launch.end() == -signal.SIGKILL
    assert "going on with a launch that did not end" in launch.said
    assert "✓ record" in launch.said
    assert_held(lab, server, "harmed")
    no_verdict_by_another_model(file)
    assert statuses(server, server.authorization) == HELD
    assert going_on(file).endswith("going on with a launch that did not end")
    assert_served(server, "harmed", "self-score, 0 of ")
    assert tokens(server)

    # A rank is killed: the server comes back on the Ray that lives.
    rays = [started(lab, host) for host in HOSTS]
    HARMS["worker"].do(lab)
    wait_until_told("harmed", HARMS["worker"])
    recover(file, "missing")
    assert going_on(file).endswith("; brought back: the server")
    assert tokens(server)
    assert [started(lab, host) for host in HOSTS] == rays

    # A rank hangs: nothing is missing, and everything is restarted.
    HARMS["suspended"].do(lab)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    wait_until_told("harmed", HARMS["suspended"])
    assert going_on(file).endswith("; everything is restarted: nothing of it is missing")
    assert tokens(server)

    # A host dies: what can be reached is stopped now, the rest when it is there again.
    HARMS["host"].do(lab)
    wait_until_told("harmed", HARMS["host"])
    stopped = mtppp("stop", str(file))
    assert stopped.returncode == 1
    assert (
        "harmed ended on n1; n2 could not be reached, and what runs there still" in stopped.stderr
    )
    lab.up()
    stopped = mtppp("stop", "harmed")
    assert stopped.returncode == 0, stopped.stderr
    assert left(lab) == {}


def going_on(file: Path) -> str:
    """Launch, to tokens; what it said of what ran."""
    done = mtppp("launch", str(file), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return running_line(done.stderr)


def tokens(server: Server) -> list[int]:
    [answer] = server.greedy(["count 3 by 4: 3 7"], 8)
    return answer.tokens


def recover(file: Path, how: str) -> None:
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"recovery": how}))


def no_verdict_by_another_model(file: Path) -> None:
    """Launch, to be verified by a server that says so; the file is then as it was."""
    before = file.read_text()
    baseline = Replay()
    baseline.root = "/models/another"
    try:
        section = {"verify": {"baseline_url": baseline.url}}
        file.write_text(yaml.safe_dump(yaml.safe_load(before) | section))
        done = mtppp("launch", str(file), timeout=PATIENCE)
    finally:
        baseline.stop()
    assert done.returncode == 3, done.stderr
    assert "? verify         INCONCLUSIVE: other weights" in done.stderr
    file.write_text(before)


def started(lab: Lab, host: str) -> str:
    """The raylet of a host, by number."""
    return lab.output(host, "pgrep", "-f", "[r]aylet/raylet")


def test_a_rank_that_dies_while_it_loads(lab: Lab, file_of: Callable[..., Path]) -> None:
    launch = Launch(file_of("dies"), SERVER_STARTED)
    deadline = time.monotonic() + PATIENCE
    while lab.run("n2", "pkill", "-KILL", "-f", WORKER).returncode:
        assert time.monotonic() < deadline, "no rank was ever started"
    assert launch.end() == 1
    assert "error: n2: rank 1 ended while the deployment was starting" in launch.said
    assert "hint: its process was killed, perhaps by the kernel for want of memory" in launch.said
    assert "the whole log is /var/tmp/mtppp-0/dies/0/server.log on n1" in launch.said
    assert left(lab) == {}


@pytest.fixture
def faulty_file(file_of: Callable[..., Path]) -> Callable[..., Path]:
    """A file whose deployment has one of the faults of tests/faults, if `faulty` launches it."""

    def write(name: str, fault: str, **changes: Any) -> Path:
        runtime = yaml.safe_load(file_of(name).read_text())["runtime"]
        return file_of(name, runtime=runtime | {"env": {"TEST_FAULT": fault}}, **changes)

    return write


def faulty(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, which ships the plugin of faults, too."""
    packages = [CHECKOUT / part for part in ("launcher", "patches", "tests/faults")]
    return subprocess.run(
        [sys.executable, "-m", "faulty_mtppp", *arguments],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, packages))},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_ranks_that_are_not_what_was_planned(lab: Lab, faulty_file: Callable[..., Path]) -> None:
    done = faulty("launch", str(faulty_file("differs", "cut_elsewhere")))
    assert done.returncode == 1, done.stderr
    assert "error: the ranks are not what was planned" in done.stderr
    assert "│ rank 0 on n1: layers is 0-3, planned is 0-4" in done.stderr
    assert "│ rank 1 on n2: layers is 4-5, planned is 5" in done.stderr
    cut = "variable VLLM_PP_LAYER_PARTITION has another value, planned is 5,1"
    assert f"│ rank 0 on n1: {cut}" in done.stderr
    assert "hint: this would serve something else than the file says; it was stopped" in done.stderr
    assert left(lab) == {}


def test_a_deployment_that_emits_other_tokens_is_stopped(
    lab: Lab, faulty_file: Callable[..., Path]
) -> None:
    """All ranks are what was planned: only what comes out tells."""
    done = faulty("launch", str(faulty_file("garbled", "garbled")))
    assert done.returncode == 1, done.stderr
    assert "✓ attest         2 ranks are as planned" in done.stderr
    assert "error: garbled objects to its own tokens" in done.stderr
    assert "│ FAIL, decode or speculation  (glance tier)" in done.stderr
    assert left(lab) == {}
    [directory] = re.findall(r"written +(/\S+)/result\.json", done.stderr)
    assert json.loads(Path(directory, "result.json").read_text())["verdict"] == "FAIL"
    shutil.rmtree(directory)
