"""What status tells, what a second launch does, and what stop proves: with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtppp import state
from mtppp.console import Console, Step
from mtppp.engine.client import EngineClient
from mtppp.errors import ConnectFailed, Inconclusive, MtpppError
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.lock import Holder
from mtppp.hosts.node import Node
from mtppp.phases import status as status_module
from mtppp.phases import stop as stop_module
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import Starts, WithoutTrace, run_phases
from mtppp.phases.running import CompareWithRunning
from mtppp.phases.status import ask
from mtppp.phases.stop import STOP
from mtppp.plan.plan import NodePlan

Deploy = Callable[..., Deployment]

# A server that is healthy. MODE: a token comes; none does; none does for us, and many for others.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
generated = 0
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, text, status=200):
        self.send_response(status); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        global generated
        generated += 7 if "MODE" == "busy" else 0
        self.answer("vllm:generation_tokens_total{engine=\\"0\\"} %d.0\\n" % generated)
    def do_POST(self):
        if "MODE" == "key": self.answer("no", 401)
        elif "MODE" != "serving": time.sleep(600)
        self.answer(json.dumps({"choices": [{"text": "a", "finish_reason": "length"}],
                                "usage": {"completion_tokens": 1}}))
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.fixture
def launched(
    deploy: Deploy, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Deployment]]:
    """A deployment as a launch leaves it, made without one; its server as it is told."""
    monkeypatch.setattr(status_module, "HEALTH_DEADLINE", 1.0)
    started: list[subprocess.Popen[bytes]] = []

    def start(planned: NodePlan, role: str, argv: list[str]) -> dict[str, Any]:
        env = {"MTPPP_RUN_DIR": planned.directory, "MTPPP_DEPLOYMENT": "half-dead"}
        started.append(subprocess.Popen(argv, env=env, start_new_session=True))
        pid = started[-1].pid
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return {"role": role, "pid": pid, "started": int(ticks), "log": "log"}

    def make(
        mode: str = "serving",
        *,
        checked: bool = True,
        memory: list[int] | None = None,
        roles: tuple[str, ...] = ("ray", "server"),
    ) -> Deployment:
        script = SERVER.replace("MODE", mode).replace("PORT", str(free_port))
        commands = {"ray": ["sleep", "600"], "server": [sys.executable, "-c", script]}
        # Ports that nothing else on this machine has.
        deployment = deploy(ray={"base_port": 10000 + 200 * (os.getpid() % 80)})
        for planned in deployment.plan.nodes:
            entries = [
                start(planned, role, commands[role])
                for role in roles
                if role == "ray" or planned.index == 0
            ]
            attested = {"rank": planned.index, "pid": entries[0]["pid"], "layers": [0]}
            put(planned, "processes.json", entries)
            put(planned, f"attest/rank-000{planned.index}.json", attested)
            put(planned, "plan.json", deployment.plan.fields())
            put(planned, "launch.json", {"by": "ann@desk", "since": "T", "gpu_memory": memory})
        if checked:
            put(deployment.plan.head, "checked.json", {"by": "ann@desk", "at": "T"})
        with EngineClient(deployment.plan.endpoint) as client:
            while "server" in roles and not client.healthy():
                time.sleep(0.01)
        return deployment

    yield make
    for process in started:
        process.kill()
        process.wait()


def put(planned: NodePlan, name: str, value: Any) -> None:
    path = Path(planned.directory, name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def entries(deployment: Deployment, index: int) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads(
        Path(deployment.plan.nodes[index].directory, "processes.json").read_text()
    )
    return recorded


def kill(deployment: Deployment, index: int, role: str, number: int = signal.SIGKILL) -> None:
    [pid] = [entry["pid"] for entry in entries(deployment, index) if entry["role"] == role]
    os.kill(pid, number)


def told(deployment: Deployment) -> tuple[str, str]:
    status = ask(deployment)
    return status.state, status.explanation


def test_it_serves(launched: Callable[..., Deployment]) -> None:
    status = ask(launched())
    assert (status.state, status.explanation) == ("serving", "a token came")
    assert status.seconds_to_token is not None
    assert status.checked
    assert [rank["alive"] for rank in status.ranks] == [True, True]
    assert [node.processes for node in status.nodes] == [
        {"ray": True, "server": True},
        {"ray": True},
    ]


def test_what_is_gone_is_told_by_name(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    kill(deployment, 0, "server")
    assert told(deployment) == ("broken", "server on a has ended")
    kill(deployment, 1, "ray")
    assert told(deployment) == (
        "broken",
        "server on a has ended; ray on b has ended; rank 1 on b has ended",
    )


@pytest.mark.parametrize(
    ("mode", "told_of_it"),
    [
        ("hung", ("hung", "the server says it is healthy, but: {url} gave no answer in 1 s")),
        ("busy", ("serving", "it is busy: in 1 s tokens came for others, not for us")),
        ("key", ("unknown", "the server wants a key: export VLLM_API_KEY")),
    ],
)
def test_no_token_comes(
    launched: Callable[..., Deployment], mode: str, told_of_it: tuple[str, str]
) -> None:
    deployment = launched(mode)
    url = f"{deployment.plan.endpoint}/v1/completions"
    assert told(deployment) == (told_of_it[0], told_of_it[1].format(url=url))


def test_a_suspended_process_is_told(launched: Callable[..., Deployment]) -> None:
    deployment = launched("hung")
    kill(deployment, 1, "ray", signal.SIGSTOP)
    told_state, explanation = told(deployment)
    assert told_state == "hung"
    assert "; b: suspended: " in explanation


class Unreachable(LocalTransport):
    def connect(self) -> None:
        raise ConnectFailed(self.host, "port 22: timed out")


def cut_off(deployment: Deployment, index: int) -> Deployment:
    """The same, with a node that cannot be reached."""
    nodes = list(deployment.nodes)
    nodes[index] = Node(Unreachable(nodes[index].host), sys.executable)
    return replace(deployment, nodes=nodes, unreachable={})


def test_a_node_that_cannot_be_reached(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    assert told(cut_off(deployment, 1)) == ("serving", "a token came; b could not be asked")
    kill(deployment, 0, "server")
    assert told(cut_off(deployment, 1)) == (
        "broken",
        "server on a has ended; b could not be asked",
    )
    [problem] = [node.problem for node in ask(cut_off(deployment, 1)).nodes if node.problem]
    assert problem == "b: port 22: timed out"


def test_who_works_on_it_is_told(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    name = deployment.cluster.name
    other = Node(LocalTransport("a"), sys.executable)
    for what, state_of_it in (("launch", "serving"), ("stop", "stopping")):
        other.lock(0, Holder.here(what, name))
        found = ask(deployment)
        assert (found.state, found.nodes[0].doing) == (state_of_it, what)
        other.unlock("done")
    run_phases(STOP, deployment, Console())
    assert told(deployment) == ("stopped", "nothing of it runs")
    other.lock(0, Holder.here("launch", name))
    told_state, explanation = told(deployment)
    assert told_state == "starting"
    assert explanation.startswith(f"{name} is being launched by ")
    other.unlock("done")


# ---- a second launch -------------------------------------------------------------------------


class Begins(Starts, WithoutTrace):
    """Stands for what a launch starts."""

    title = "begins"

    def __init__(self) -> None:
        self.begun = False

    def run(self, deployment: Deployment, step: Step) -> None:
        self.begun = True


class Checks(WithoutTrace):
    """Stands for what a launch does once everything runs."""

    title = "checks"

    def __init__(self) -> None:
        self.done = False

    def run(self, deployment: Deployment, step: Step) -> None:
        self.done = True


def launch_again(deployment: Deployment) -> tuple[bool, bool]:
    """Whether anything was started, and whether anything was checked."""
    begins, checks = Begins(), Checks()
    run_phases([CompareWithRunning(), begins, checks], deployment, Console())
    return begins.begun, checks.done


def test_what_is_as_planned_is_left_alone(launched: Callable[..., Deployment]) -> None:
    assert launch_again(launched()) == (False, False)


def test_a_launch_that_did_not_end_is_gone_on_with(launched: Callable[..., Deployment]) -> None:
    deployment = launched(checked=False)
    assert launch_again(deployment) == (False, True)
    assert told(deployment)[0] == "serving"


@pytest.mark.parametrize("harm", ["server", "ray", "hung", "never served"])
def test_what_is_broken_is_stopped_and_launched_anew(
    launched: Callable[..., Deployment], harm: str
) -> None:
    roles = ("ray",) if harm == "never served" else ("ray", "server")
    deployment = launched("hung" if harm == "hung" else "serving", roles=roles)
    if harm == "server":
        kill(deployment, 0, "server")
    if harm == "ray":
        kill(deployment, 1, "ray")
    assert launch_again(deployment) == (True, True)
    assert told(deployment) == ("stopped", "nothing of it runs")


def test_what_is_protected_is_not_stopped(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    deployment.protected = True
    kill(deployment, 0, "server")
    with pytest.raises(MtpppError) as raised:
        launch_again(deployment)
    name = deployment.cluster.name
    assert raised.value.message == (
        f"{name} is protected, and would have to be stopped first: server on a has ended"
    )
    assert raised.value.hint == f"to go ahead: --yes {name}"
    assert ask(deployment).nodes[1].marked


def test_a_change_wants_to_be_told(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    changed = replace(deployment.plan, vllm="0.33.0")
    assert deployment.reviewed is not None
    deployment.reviewed = replace(deployment.reviewed, plan=changed)
    with pytest.raises(MtpppError, match=r"not as planned: vLLM: 0\.32\.0 runs, 0\.33\.0 is"):
        launch_again(deployment)
    deployment.restart = True
    assert launch_again(deployment) == (True, True)
    assert told(deployment)[0] == "stopped"


# ---- stop ------------------------------------------------------------------------------------


def test_stop_does_what_it_can_and_finishes_later(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    name = deployment.cluster.name
    state.forget(name)
    with pytest.raises(MtpppError) as raised:
        run_phases(STOP, cut_off(deployment, 0), Console())
    assert raised.value.message == (
        f"{name} ended on b; a could not be reached, and what runs there still does"
    )
    assert raised.value.details == ("a: port 22: timed out",)
    assert (
        raised.value.hint == f"`mtppp stop {name}` once more when it can be reached ends the rest"
    )
    assert name in state.known()
    assert [node.marked > 0 for node in ask(deployment).nodes] == [True, False]
    run_phases(STOP, deployment, Console())
    assert told(deployment)[0] == "stopped"
    assert name not in state.known()


def test_stop_reaches_nobody(launched: Callable[..., Deployment]) -> None:
    deployment = cut_off(cut_off(launched(), 0), 1)
    with pytest.raises(ConnectFailed, match=r"^a: port 22: timed out$"):
        run_phases(STOP, deployment, Console())


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has nvidia-smi tell how much memory is in use."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stop_module, "GPU_MEMORY_PATIENCE", 0.0)

    def use(mebibytes: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncase $1 in *memory.used) printf '{mebibytes}';; esac\n")
        program.chmod(0o755)

    return use


@pytest.mark.parametrize(
    ("after", "doubt"),
    [
        ("4\\n104\\n", None),
        ("4\\n4100\\n", "b: GPU 1 holds 4.0 GiB more than before the launch;"),
        ("[N/A]\\n", "b: memory of its GPUs: the driver does not count this GPU's memory"),
    ],
)
def test_memory_of_gpus_is_back_to_what_it_was(
    launched: Callable[..., Deployment],
    gpus: Callable[[str], None],
    after: str,
    doubt: str | None,
) -> None:
    deployment = launched(memory=[4 * 2**20, 4 * 2**20])
    gpus(after)
    if doubt is None:
        run_phases(STOP, deployment, Console())
        return
    with pytest.raises(Inconclusive) as raised:
        run_phases(STOP, deployment, Console())
    assert raised.value.exit_status == 3
    assert any(line.startswith(doubt) for line in raised.value.details)
    assert told(deployment)[0] == "stopped"


def test_a_port_that_is_not_free_again_is_told(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    planned = deployment.plan.nodes[1]
    port = planned.ports.node_manager
    with socket.create_server((planned.address, port)), pytest.raises(Inconclusive) as raised:
        run_phases(STOP, deployment, Console())
    [doubt] = raised.value.details
    assert doubt.startswith(f"b: port {port} is still taken (pid {os.getpid()}: ")
