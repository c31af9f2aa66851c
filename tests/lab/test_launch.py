"""The main job, for real: `mtppp launch` over ssh, Ray and vLLM, against a TP-only server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from deployments import (
    COMMAND,
    MODELS,
    PROMPTS,
    Server,
    cluster_file,
    imported_file,
    launched,
    mtppp,
)
from lab_driver import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NEAR_TIE = 0.5
"""Nats. Two layouts add up in different orders; tokens this close may change places."""
SCORED_PROMPTS = 50
TOKENS = 24
HUNG_UP, LONG = 12, 300
"""Streams whose clients go while others are answered, and how long they would have been."""


@pytest.mark.parametrize(
    ("release", "model", "file_of"),
    [
        ("0.32.0", "demo-glm4-moe", imported_file),  # as vLLM ships it
        ("0.29.0", "demo-deepseek-v3", cluster_file),  # with all patches
    ],
)
def test_pp_with_mtp_emits_what_a_tp_only_server_would(
    lab: Lab,
    tmp_path: Path,
    vllm_python: Callable[[str], Path],
    release: str,
    model: str,
    file_of: Callable[..., Path],
) -> None:
    hosts = ["n1", "n2"]
    texts = [prompt["text"] for prompt in PROMPTS][:: len(PROMPTS) // SCORED_PROMPTS]
    where = {"hosts": hosts, "model": model, "python": vllm_python(release), "release": release}
    candidate = file_of(tmp_path, lab, **where)
    with launched(candidate) as server:
        assert "chat:" in server.said
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(server.hang_up, texts[:HUNG_UP], after=3, tokens=LONG)
            answers = server.greedy(texts[:SCORED_PROMPTS], TOKENS)
            assert gone.result() == [3] * HUNG_UP
        assert_idle(server)
        drafts, accepted = server.accepted()
        scored = sum(len(answer.tokens) for answer in answers)
        # A step of a request yields what it accepts and one token more. The engine counts them, of
        # requests too whose end the server alone has heard.
        made = drafts + sum(accepted)
        assert made < scored + HUNG_UP * LONG / 2, "streams went on without their clients"
        assert server.metric("mtppp_invariant_checks_total") > 0
        assert server.metric("mtppp_invariant_violations_total") == 0
    assert len(answers) == SCORED_PROMPTS
    assert all(answer.tokens for answer in answers)
    assert len(accepted) == 3
    assert all(0 < count < drafts for count in accepted), (drafts, accepted)

    baseline = cluster_file(
        tmp_path, lab, **where, name=f"{model}-tp", parallel={"tensor": 2}, speculative=None
    )
    with launched(baseline) as server:
        gaps = server.gaps(answers)
    wrong = [(i, gap) for i, row in enumerate(gaps) for gap in row if gap > NEAR_TIE]
    assert not wrong, f"{len(wrong)} tokens the baseline would not have emitted: {wrong[:5]}"


def test_three_stages_follow_the_file_and_not_the_order_of_joining(
    lab: Lab, tmp_path: Path, vllm_python: Callable[[str], Path]
) -> None:
    """On a release whose patches are the most."""
    hosts = ["n2", "n3", "n1"]
    file = cluster_file(
        tmp_path,
        lab,
        hosts=hosts,
        model="demo-glm4-moe",
        python=vllm_python("0.27.1"),
        release="0.27.1",
        name="three",
        parallel={"pipeline": 3, "layer_partition": [3, 2, 1]},
        serve={"args": {"max-model-len": 512, "max-num-seqs": 8, "dtype": "bfloat16"}},
    )
    with JoinsLast("/three/1", lab.output), launched(file) as server:
        attested = {
            host: json.loads(lab.output(host, "sh", "-c", "cat /var/tmp/mtppp-0/three/*/attest/*"))
            for host in hosts
        }
        [answer] = server.greedy(["count 3 by 4: 3 7"], 8)
    assert answer.tokens
    held = [(attested[h]["hostname"], attested[h]["rank"], attested[h]["layers"]) for h in hosts]
    assert held == [("n2", 0, [0, 1, 2]), ("n3", 1, [3, 4]), ("n1", 2, [5])]
    assert [bool(attested[host]["drafter"]) for host in hosts] == [False, False, True]


def assert_idle(server: Server) -> None:
    """Nothing runs or waits, within seconds of the last client's going."""
    deadline = time.monotonic() + 20
    while server.metric("vllm:num_requests_running") or server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, server.metrics()
        time.sleep(0.2)


class JoinsLast:
    """Holds a node's `ray start` until every other node has joined: stopped, then continued."""

    def __init__(self, mark: str, output: object) -> None:
        self._mark = mark.encode()
        self._thread = threading.Thread(target=self._hold)
        self._give_up = time.monotonic() + 200
        self.held = False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._thread.join()
        assert self.held, "the node was not held back: the order of joining was not what was meant"

    def _hold(self) -> None:
        while time.monotonic() < self._give_up:
            for pid in _started("ray.scripts.scripts", self._mark):
                os.kill(pid, signal.SIGSTOP)
                # The others need a raylet each: head's and one more.
                while len(_started("raylet/raylet", b"/three/")) < 2:
                    time.sleep(0.1)
                time.sleep(2)
                os.kill(pid, signal.SIGCONT)
                self.held = True
                return
            time.sleep(0.01)


def _started(command: str, mark: bytes) -> list[int]:
    """Processes with this in their command line, and a run directory that has `mark`."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            line = (directory / "cmdline").read_bytes()
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if command.encode() in line and any(
            entry.startswith(b"MTPPP_RUN_DIR=") and mark in entry for entry in environment
        ):
            found.append(int(directory.name))
    return found


def test_stop_ends_what_is_ours_and_nothing_else(
    lab: Lab, tmp_path: Path, vllm_python_0_32: Path
) -> None:
    file = cluster_file(
        tmp_path, lab, hosts=["n1", "n2"], model="demo-glm4-moe", python=vllm_python_0_32
    )
    before = {host: _traces(lab, host) for host in ("n1", "n2")}
    with ForeignRay(lab, vllm_python_0_32), ForeignVllm(lab, vllm_python_0_32) as foreign:
        beside = {host: _traces(lab, host) for host in ("n1", "n2")}
        with launched(file) as server:
            assert server.greedy(["count 3 by 4: 3 7"], 4)[0].tokens
            _launch_again_changes_nothing(file)
            ours = _traces(lab, "n1")["processes"] - beside["n1"]["processes"]
            assert ours
        after = {host: _traces(lab, host) for host in ("n1", "n2")}
        for host in ("n1", "n2"):
            assert after[host]["ports"] <= beside[host]["ports"]
            assert after[host]["shared_memory"] <= beside[host]["shared_memory"]
            assert beside[host]["processes"] <= after[host]["processes"], "something foreign ended"
            assert after[host]["processes"] <= beside[host]["processes"], "something was left"
        assert foreign.greedy(["count 3 by 4: 3 7"], 4)[0].tokens
        status = lab.run("n1", str(vllm_python_0_32), "-m", "ray.scripts.scripts", "status")
        assert "Active" in status.stdout, status.stderr
    assert _traces(lab, "n2")["shared_memory"] <= before["n2"]["shared_memory"]
    again = mtppp("stop", str(file))
    assert again.returncode == 0
    assert "was not running" in again.stderr


def _launch_again_changes_nothing(file: Path) -> None:
    again = mtppp("launch", str(file))
    assert again.returncode == 0, again.stderr
    assert "nothing was changed" in again.stderr
    status = json.loads(mtppp("status", "demo-glm4-moe-pp", "--json").stdout)
    assert status["state"] == "serving"
    assert [rank["stage"] for rank in status["ranks"]] == [0, 1]
    changed = file.with_name("changed.yaml")
    changed.write_text(file.read_text().replace("max-num-seqs: 8", "max-num-seqs: 4"))
    refused = mtppp("launch", str(changed))
    assert refused.returncode == 1
    assert "not as planned: vllm serve --max-num-seqs: 8 runs, 4 is planned" in refused.stderr


def _traces(lab: Lab, host: str) -> dict[str, set[str]]:
    """Long-lived processes, listening ports and shared memory of a host."""
    script = """
    for p in /proc/[0-9]*; do
      [ -r $p/cmdline ] || continue
      line=$(tr '\\0' ' ' < $p/cmdline); [ -n "$line" ] || continue
      case $line in sshd*|*sh\\ -c*|sh\\ *|tr\\ *) continue;; esac
      echo "processes ${p#/proc/} $line"
    done
    ss -Hltn | awk '{print "ports", $4}'
    ls /dev/shm | sed 's/^/shared_memory /'
    """
    found: dict[str, set[str]] = {"processes": set(), "ports": set(), "shared_memory": set()}
    for line in lab.output(host, "sh", "-c", script).splitlines():
        kind, _, what = line.strip().partition(" ")
        # Titles change while a process runs; its number does not.
        found[kind].add(what.partition(" ")[0])
    return found


class ForeignRay:
    """A Ray cluster of somebody else on n1."""

    def __init__(self, lab: Lab, python: Path) -> None:
        self._lab, self._python = lab, str(python)

    def __enter__(self) -> None:
        started = self._lab.run(
            "n1", self._python, "-m", "ray.scripts.scripts", "start", "--head",
            "--node-ip-address=10.77.0.1", "--port=6390", "--num-cpus=1",
            "--include-dashboard=false", "--disable-usage-stats",
            "--object-store-memory=100000000", timeout=120,
        )  # fmt: skip
        assert started.returncode == 0, started.stderr

    def __exit__(self, *exc: object) -> None:
        self._lab.run("n1", self._python, "-m", "ray.scripts.scripts", "stop", "--force")


class ForeignVllm:
    """A vLLM server of somebody else on n1, one process group, no Ray."""

    def __init__(self, lab: Lab, python: Path) -> None:
        self._lab, self._python = lab, str(python)

    def __enter__(self) -> Server:
        env = "VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"
        serve = (
            f"env {env} TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 setsid {self._python} -m"
            f" vllm.entrypoints.cli.main serve {MODELS}/demo-glm4-moe --served-model-name foreign"
            " --host 10.77.0.1 --port 8100 --max-model-len 256 --max-num-seqs 2 --enforce-eager"
            " --dtype float32 > /tmp/foreign.log 2>&1 < /dev/null & echo $! > /tmp/foreign.pid"
        )
        self._lab.output("n1", "sh", "-c", serve)
        server = Server("http://10.77.0.1:8100", "foreign")
        deadline = time.monotonic() + 240
        while True:
            try:
                if httpx.get(server.url + "/health", timeout=5).status_code == 200:
                    return server
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self._lab.output("n1", "tail", "/tmp/foreign.log")
            time.sleep(1)

    def __exit__(self, *exc: object) -> None:
        self._lab.output("n1", "sh", "-c", "kill $(cat /tmp/foreign.pid)")


@pytest.fixture
def vllm_python_0_32(vllm_python: Callable[[str], Path]) -> Path:
    return vllm_python("0.32.0")


def test_help_is_quick() -> None:
    """Processor time, so that a busy machine does not decide."""
    used = []
    for _ in range(3):
        before = os.times()
        subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)
        after = os.times()
        used.append(
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )
    assert min(used) < 0.3, used
