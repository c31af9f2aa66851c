"""What status tells, what a second launch does, and what stop proves: with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtppp import state
from mtppp.cli import status as status_command
from mtppp.cli.verify_servers import server_of
from mtppp.console import Console, Step
from mtppp.engine.client import EngineClient
from mtppp.errors import ConnectFailed, Inconclusive, MtpppError
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.lock import Holder
from mtppp.hosts.node import Node
from mtppp.phases import status as status_module
from mtppp.phases import stop as stop_module
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import Phase, Starts, WithoutTrace, run_phases
from mtppp.phases.ray_cluster import StartRay
from mtppp.phases.running import CompareWithRunning
from mtppp.phases.serve import StartServer
from mtppp.phases.ship import ShipPlugins
from mtppp.phases.status import ask
from mtppp.phases.stop import STOP
from mtppp.plan.plan import NodePlan
from mtppp_patches.observations import DRAFT_IDS, FILE, Ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

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
        if "MODE" == "key" and self.headers["Authorization"] != "Bearer right":
            return self.answer("no", 401)
        if "MODE" == "forbidden": return self.answer("no", 403)
        if "MODE" in ("hung", "busy"): time.sleep(600)
        self.answer(json.dumps({"choices": [{"text": "a", "finish_reason": "length"}],
                                "usage": {"completion_tokens": 1}}))
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""

RAY = ["sleep", "600"]
NO_KEY = "its key is not known here: export VLLM_API_KEY, listed under secrets"


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
        recovery: str = "everything",
        worker: bool = False,
    ) -> Deployment:
        before = len(started)
        script = SERVER.replace("MODE", mode).replace("PORT", str(free_port))
        ray = ["sh", "-c", f"setsid {' '.join(RAY)} & exec {' '.join(RAY)}"] if worker else RAY
        commands = {"ray": ray, "server": [sys.executable, "-c", script]}
        # Ports that nothing else on this machine has.
        base_port = 10000 + 200 * (os.getpid() % 80)
        deployment = deploy(ray={"base_port": base_port}, recovery=recovery)
        for planned in deployment.plan.nodes:
            entries = [
                start(planned, role, commands[role])
                for role in roles
                if role == "ray" or planned.index == 0
            ]
            attested = {"rank": planned.index, "stage": planned.index, "tensor_rank": 0}
            attested |= {"pid": entries[0]["pid"], "layers": [0], "drafter": False, "patches": []}
            put(planned, "processes.json", entries)
            put(planned, f"attest/rank-000{planned.index}.json", attested)
            put(planned, "plan.json", deployment.plan.fields())
            put(planned, "launch.json", {"by": "ann@desk", "since": "T", "gpu_memory": memory})
        put(deployment.plan.head, "gate-server.json", {"instance": "1"})
        opened = {"instance": "1", "why": "PASS", "by": "ann@desk", "at": "T"}
        put(deployment.plan.head, "gate-open.json", opened)
        if checked:
            put(deployment.plan.head, "checked.json", {"by": "ann@desk", "at": "T"})
        with EngineClient(deployment.plan.endpoint) as client:
            while "server" in roles and not client.healthy():
                assert all(process.poll() is None for process in started[before:])
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
        ("key", ("unknown", f"the server answers, but {NO_KEY}")),
        ("forbidden", ("unknown", f"the server answers, but {NO_KEY}")),
    ],
)
def test_no_token_comes(
    launched: Callable[..., Deployment], mode: str, told_of_it: tuple[str, str]
) -> None:
    deployment = launched(mode)
    url = f"{deployment.plan.endpoint}/v1/completions"
    assert told(deployment) == (told_of_it[0], told_of_it[1].format(url=url))


def test_a_server_that_was_ready_is_not_starting(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    kill(deployment, 0, "server", signal.SIGSTOP)
    told_state, explanation = told(deployment)
    url = f"{deployment.plan.endpoint}/v1/completions"
    assert told_state == "hung"
    assert explanation.startswith(
        f"the server was ready, and is not any more: {url} gave no answer in 1 s; a: suspended: "
    )
    assert launch_again(deployment) == (True, True)


def with_key(deployment: Deployment, key: str) -> Deployment:
    return replace(deployment, secrets={"VLLM_API_KEY": key})


def test_a_server_with_a_key_is_asked_with_it(
    launched: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = with_key(launched("key"), "right")
    assert told(deployment) == ("serving", "a token came")
    assert launch_again(deployment) == (False, False)

    def no_way(self: Deployment, endpoint: str) -> Any:
        raise ConnectFailed("a", "port 22: timed out")

    # The server may be up when its node's sshd is not.
    monkeypatch.setattr(Deployment, "way", no_way)
    assert told(cut_off(deployment, 0)) == ("serving", "a token came; a could not be asked")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", NO_KEY),
        ("old", "not to the VLLM_API_KEY of this environment: it was launched with another"),
    ],
)
def test_without_its_key_a_server_is_not_called_hung(
    launched: Callable[..., Deployment], key: str, why: str
) -> None:
    deployment = with_key(launched("key"), key)
    status = ask(deployment)
    assert (status.state, status.explanation) == ("unknown", f"the server answers, but {why}")
    assert status.endpoint == deployment.plan.endpoint
    with pytest.raises(MtpppError) as raised:
        launch_again(deployment)
    assert raised.value.message == f"{status.name}: {status.explanation}"
    assert ask(deployment).nodes[0].marked


VIOLATION = "invariant draft_ids does not hold in step 7: token ids differ between (stage 0 tensor"


def count_violations(deployment: Deployment, times: int) -> None:
    """What the engine writes on the first node."""
    counts = Counter({DRAFT_IDS: times})
    latest = [f"{VIOLATION} rank 0) and (stage 1 tensor rank 0)"] * times
    Ledger(counts, counts, latest).write(Path(deployment.plan.head.directory))


def test_ranks_that_do_not_compute_one_model_are_told(
    launched: Callable[..., Deployment], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = launched()
    count_violations(deployment, 0)
    assert told(deployment) == ("serving", "a token came")
    count_violations(deployment, 2)
    status = ask(deployment)
    assert status.state == "wrong"
    assert "2 times" in status.explanation
    assert VIOLATION in status.explanation
    assert json.loads(status.to_json())["violations"] == {"draft_ids": 2}
    assert status_command.exit_status(status) == 1
    status_command.show(status)
    shown = capsys.readouterr().out
    assert "WRONG: invariant draft_ids did not hold, 2 times" in shown
    assert f"    {VIOLATION} rank 0) and (stage 1 tensor rank 0)\n" in shown
    kill(deployment, 0, "server")
    assert told(deployment)[0] == "broken"
    assert VIOLATION in told(deployment)[1]


def test_what_is_wrong_is_launched_anew_when_told_to(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    count_violations(deployment, 1)
    with pytest.raises(MtpppError, match="runs as planned, but its ranks did not compute one"):
        launch_again(deployment)
    deployment.restart = True
    assert launch_again(deployment) == (True, True)
    assert not Path(deployment.plan.head.directory, FILE).exists()


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
    # Of a server on a host that is not reached nobody can say that it is still on its way.
    assert told(cut_off(deployment, 0)) == (
        "unknown",
        "the server is not ready; a could not be asked",
    )


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
    said = rf"^{name} is starting: {name} is being launched by .* since \d{{4}}-"
    with pytest.raises(MtpppError, match=said) as raised:
        server_of(deployment, "candidate")
    assert raised.value.hint == "wait until that has ended, then verify again"
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


@pytest.mark.parametrize(
    ("phases", "told_of_it", "left_alone"),
    [
        ([ShipPlugins()], ("stopped", "nothing of it runs"), False),
        ([ShipPlugins(), StartRay()], ("broken", "the server was never started"), False),
        (
            [ShipPlugins(), StartRay(), StartServer()],
            ("starting", "the server is not ready"),
            True,
        ),
    ],
)
def test_where_the_operator_died_the_next_launch_goes_on(
    deploy: Deploy,
    step: Step,
    phases: list[Phase],
    told_of_it: tuple[str, str],
    left_alone: bool,
) -> None:
    deployment = deploy()
    for phase in phases:
        phase.run(deployment, step)  # and nothing is cleaned up
    assert told(deployment) == told_of_it
    assert launch_again(deployment) == (not left_alone, True)
    assert told(deployment)[0] == ("starting" if left_alone else "stopped")


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


# ---- only what is missing --------------------------------------------------------------------


def launch_missing(deployment: Deployment) -> tuple[str, list[int]]:
    """What is said of it, and how many processes each node then has left."""
    step = Step(Console(), "running")
    CompareWithRunning().run(deployment, step)
    return step.note, [node.marked for node in ask(deployment).nodes]


def test_the_server_is_brought_back_alone(launched: Callable[..., Deployment]) -> None:
    deployment = launched(recovery="missing", worker=True)
    kill(deployment, 0, "server")
    note, left = launch_missing(deployment)
    assert note == "server on a has ended; brought back: the server"
    # What runs in Ray without being of it, as ranks do, has ended with the server.
    assert left == [1, 1]
    assert deployment.living == {0, 1}
    assert [entry["role"] for entry in entries(deployment, 0)] == ["ray"]
    remaining = {path.name for path in Path(deployment.plan.head.directory).iterdir()}
    assert remaining.isdisjoint({"attest", "checked.json"})


def test_ray_of_another_node_is_brought_back_with_the_server(
    launched: Callable[..., Deployment], gpus: Callable[[str], None], step: Step
) -> None:
    deployment = launched(recovery="missing", memory=[4])
    gpus("0\\n")
    first, second = (Path(planned.directory) for planned in deployment.plan.nodes)
    (first / "ray-token").write_text("its token")
    before = [entry["pid"] for entry in entries(deployment, 0) if entry["role"] == "ray"]
    kill(deployment, 1, "ray")
    note, left = launch_missing(deployment)
    assert note == (
        "ray on b has ended; rank 1 on b has ended; brought back: the server and Ray on b"
    )
    assert left == [1, 0]
    ShipPlugins().run(deployment, step)
    StartRay().run(deployment, step)
    assert [node.processes for node in ask(deployment).nodes] == [{"ray": True}, {"ray": True}]
    assert [entry["pid"] for entry in entries(deployment, 0)] == before
    assert (second / "ray-token").read_text() == "its token"
    assert json.loads((first / "launch.json").read_text())["gpu_memory"] == [4]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("hung", "nothing of it is missing"),
        ("unchecked", "no launch had checked what is left"),
        ("first ray", "the others' Ray depends on that of a"),
    ],
)
def test_what_cannot_be_brought_back_alone_is_restarted_whole(
    launched: Callable[..., Deployment], harm: str, why: str
) -> None:
    mode = "hung" if harm == "hung" else "serving"
    deployment = launched(mode, recovery="missing", checked=harm != "unchecked")
    if harm != "hung":
        kill(deployment, 0, "ray" if harm == "first ray" else "server")
    note, left = launch_missing(deployment)
    assert note.endswith(f"; everything is restarted: {why}")
    assert left == [0, 0]
    assert not deployment.living


def test_a_living_ray_whose_token_is_lost(launched: Callable[..., Deployment], step: Step) -> None:
    deployment = launched(recovery="missing")
    kill(deployment, 0, "server")
    launch_missing(deployment)
    with pytest.raises(MtpppError, match=r"^a: the token of the Ray that runs is not in the run"):
        ShipPlugins().run(deployment, step)


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
    with pytest.raises(ConnectFailed, match=r"^a: port 22: timed out$") as raised:
        run_phases(STOP, deployment, Console())
    assert raised.value.details == ("also b: port 22: timed out",)


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
    name = deployment.cluster.name
    for _ in range(2):  # once in doubt, it is until it is proven
        with pytest.raises(Inconclusive) as raised:
            run_phases(STOP, deployment, Console())
        assert raised.value.exit_status == 3
        assert any(line.startswith(doubt) for line in raised.value.details)
        assert told(deployment)[0] == "stopped"
        assert name in state.known()
    gpus("4\\n4\\n")
    run_phases(STOP, deployment, Console())
    assert name not in state.known()


def test_doubts_are_told_also_where_a_node_is_not_reached(
    launched: Callable[..., Deployment], gpus: Callable[[str], None]
) -> None:
    deployment = cut_off(launched(memory=[4 * 2**20]), 0)
    gpus("4100\\n")
    with pytest.raises(MtpppError, match="a could not be reached") as raised:
        run_phases(STOP, deployment, Console())
    assert raised.value.details[1].startswith("b: GPU 0 holds 4.0 GiB more than before the launch;")


def test_what_is_launched_anew_waits_for_the_memory_of_gpus(
    launched: Callable[..., Deployment], gpus: Callable[[str], None], step: Step
) -> None:
    deployment = launched(memory=[4 * 2**20])
    gpus("4100\\n")
    kill(deployment, 0, "server")
    CompareWithRunning().run(deployment, step)
    assert "; a: GPU 0 holds 4.0 GiB more than before the launch; `nvidia-smi`" in step.note


def test_a_port_that_is_not_free_again_is_told(launched: Callable[..., Deployment]) -> None:
    deployment = launched()
    planned = deployment.plan.nodes[1]
    port = planned.ports.node_manager
    with socket.create_server((planned.address, port)), pytest.raises(Inconclusive) as raised:
        run_phases(STOP, deployment, Console())
    [doubt] = raised.value.details
    assert doubt.startswith(f"b: port {port} is still taken (pid {os.getpid()}: ")
