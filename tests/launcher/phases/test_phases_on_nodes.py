"""Steps that act on nodes, with real processes on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import SLEEP, patches_in_place, running

from mtppp import state
from mtppp.console import Step
from mtppp.errors import HostTimeout, MtpppError, RemoteCommandFailed
from mtppp.hosts.node import File
from mtppp.phases import ray_cluster, serve
from mtppp.phases.attest import Attest
from mtppp.phases.deployment import Deployment
from mtppp.phases.find import find
from mtppp.phases.ray_cluster import Place, StartRay
from mtppp.phases.serve import StartServer, WaitUntilReady
from mtppp.phases.ship import ShipPlugins
from mtppp.phases.stop import StopNodes
from mtppp_patches.attest import hashed

# Dozens of real processes, started and ended one after the other.
pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


def listing(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def make_directories(deployment: Deployment) -> None:
    """All that processes need of what is shipped."""
    for node, planned in deployment.members:
        node.write(planned.directory, [])


def change_plan(deployment: Deployment, **changes: Any) -> None:
    assert deployment.reviewed is not None
    plan = replace(deployment.plan, **changes)
    deployment.reviewed = replace(deployment.reviewed, plan=plan)


def alive(deployment: Deployment) -> list[int]:
    """How many processes run for each node."""
    return [
        len(node.processes(planned.directory)["marked"]) for node, planned in deployment.members
    ]


def test_ship_puts_everything_there_once(deploy: Deploy, step: Step) -> None:
    deployment = deploy(secrets=["HF_TOKEN"])
    ShipPlugins().run(deployment, step)
    first, second = (planned for _, planned in deployment.members)
    for planned in (first, second):
        gate = ["gate-key"] if planned is first else []
        assert listing(planned.directory) == [
            "cluster.json",
            *gate,
            "launch.json",
            "plan.json",
            "ray-token",
            "vllm-config",
        ]
        directory = Path(planned.directory)
        assert (directory / "plan.json").read_text() == deployment.plan.to_json()
        assert (directory / "ray-token").stat().st_mode & 0o777 == 0o600
        assert json.loads(
            (directory / "vllm-config" / "ray_non_carry_over_env_vars.json").read_text()
        ) == [
            "GLOO_SOCKET_IFNAME",
            "HF_TOKEN",
            "MTPPP_RUN_DIR",
            "NCCL_SOCKET_IFNAME",
            "PATH",
            "PYTHONPATH",
            "RAY_AUTH_TOKEN_PATH",
            "VLLM_CONFIG_ROOT",
        ]
    tokens = {Path(planned.directory, "ray-token").read_text() for planned in (first, second)}
    assert [len(token) for token in tokens] == [64]
    key = Path(first.directory, "gate-key")
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_text() == deployment.gate_key
    assert deployment.gate_key not in deployment.plan.to_json()
    shipped = {
        path.relative_to(first.plugins).as_posix(): path.read_bytes()
        for path in Path(first.plugins).rglob("*")
        if path.is_file()
    }
    assert shipped == deployment.plugins.files
    made = Path(first.plugins, "mtppp_patches", "plugin.py").stat().st_mtime_ns

    ShipPlugins().run(deployment, step)
    assert Path(first.plugins, "mtppp_patches", "plugin.py").stat().st_mtime_ns == made
    assert Path(first.directory, "ray-token").read_text() not in tokens


def test_a_node_tells_of_what_the_operators_side_has_lost(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    cluster = deployment.cluster
    ShipPlugins().run(deployment, step)
    state.forget(cluster.name)
    [known] = [known for known in find(deployment.nodes[1]) if known.cluster.name == cluster.name]
    assert known == state.Known(cluster, Path("cluster.yaml").absolute())
    ShipPlugins().clean_up(deployment)
    assert cluster.name not in [known.cluster.name for known in find(deployment.nodes[1])]


def test_ship_mends_plugins_that_arrived_in_part(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    node, planned = deployment.head
    node.write(planned.plugins, [File("mtppp_patches/plugin.py", b"half")])
    ShipPlugins().run(deployment, step)
    plugin = Path(planned.plugins, "mtppp_patches", "plugin.py")
    assert plugin.read_bytes() == deployment.plugins.files["mtppp_patches/plugin.py"]


def test_ship_removes_what_a_crash_left(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    node, planned = deployment.head
    record = [{"role": "server", "pid": 1, "started": 1, "log": "server.log"}]
    node.write(
        planned.directory,
        [
            File("processes.json", json.dumps(record).encode()),
            File("attest/rank-0007.json", b"{}"),
            File("server.log", b"kept"),
        ],
    )
    ShipPlugins().run(deployment, step)
    assert "attest" not in listing(planned.directory)
    assert Path(planned.directory, "server.log.before").read_text() == "kept"
    assert node.processes(planned.directory)["recorded"] == []


def test_ship_cleaned_up_leaves_no_token(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    ShipPlugins().run(deployment, step)
    ShipPlugins().clean_up(deployment)
    for _, planned in deployment.members:
        assert listing(planned.directory) == ["plan.json"]


def test_processes_start_on_their_nodes_and_cleaning_up_ends_them(
    deploy: Deploy, step: Step
) -> None:
    deployment = deploy()
    make_directories(deployment)
    StartRay().run(deployment, step)
    StartServer().run(deployment, step)
    assert alive(deployment) == [2, 1]
    log = f"{deployment.plan.head.directory}/server.log"
    assert step.note == f"log a:{log}"
    StartRay().clean_up(deployment)
    assert alive(deployment) == [0, 0]
    assert "processes.json" not in listing(deployment.plan.head.directory)


def test_secrets_reach_the_processes_and_no_file(deploy: Deploy, step: Step) -> None:
    deployment = deploy(
        server="import os; print(len(os.environ['HF_TOKEN']))", secrets=["HF_TOKEN"]
    )
    deployment.secrets = {"HF_TOKEN": "hf_secret_value"}
    ShipPlugins().run(deployment, step)
    StartRay().run(deployment, step)
    for _, planned in deployment.members:
        for path in Path(planned.directory).rglob("*"):
            assert path.is_dir() or b"hf_secret_value" not in path.read_bytes(), path
    [ray] = deployment.nodes[1].processes(deployment.plan.nodes[1].directory)["marked"]
    assert b"HF_TOKEN=hf_secret_value" in Path(f"/proc/{ray['pid']}/environ").read_bytes()
    assert "hf_secret_value" not in ray["command"]


def test_stop_ends_everything_and_says_so_only_once(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    make_directories(deployment)
    StartRay().run(deployment, step)
    StopNodes().run(deployment, step)
    assert alive(deployment) == [0, 0]
    assert step.note == f"{deployment.plan.name} ended on a, b"
    assert listing(deployment.plan.nodes[1].directory) == ["ray.log"]
    StopNodes().run(deployment, step)
    assert step.note == f"{deployment.plan.name} was not running"


def test_stop_goes_on_when_the_first_node_cannot_be_stopped(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    make_directories(deployment)
    StartRay().run(deployment, step)
    deployment.nodes[0].python = "/no/python"
    with pytest.raises(RemoteCommandFailed, match=r"^a: there is no python at /no/python$"):
        StopNodes().run(deployment, step)
    deployment.nodes[0].python = deployment.nodes[1].python
    assert alive(deployment) == [1, 0]


READY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
STUCK = """
import time
while True:
    print("INFO No available shared memory broadcast block found in 60 seconds.", time.time())
    time.sleep(0.1)
"""
DIES = "raise OSError(98, 'Address already in use')"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_POLL", 0.01)
    monkeypatch.setattr(serve, "_LOOK_AT_NODES", 0.0)


@pytest.mark.usefixtures("impatient")
def test_ready_when_the_server_says_so(deploy: Deploy, step: Step, free_port: int) -> None:
    deployment = deploy(server=READY.replace("{port}", str(free_port)))
    make_directories(deployment)
    StartServer().run(deployment, step)
    WaitUntilReady().run(deployment, step)
    assert step.note == f"http://127.0.0.1:{free_port}, asked directly"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_ended_is_told_with_its_last_words(deploy: Deploy, step: Step) -> None:
    deployment = deploy(server=DIES)
    make_directories(deployment)
    StartRay().run(deployment, step)
    StartServer().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        WaitUntilReady().run(deployment, step)
    log = f"{deployment.plan.head.directory}/server.log"
    assert raised.value.message == "a: vLLM's server ended while the deployment was starting"
    assert raised.value.details == ("a server: OSError: [Errno 98] Address already in use",)
    assert raised.value.hint == f"the whole log is {log} on a"


def whose_server_says(deploy: Deploy, name: str, **replaced: str) -> Deployment:
    """Where the server ends with an excerpt of what vLLM 0.32.0 and Ray 2.60.0 wrote."""
    log = (Path(__file__).parents[2] / f"data/vllm-0.32.0-{name}.log").read_text()
    for old, new in replaced.items():
        log = log.replace(old, new)
    deployment = deploy(server=f"import sys; sys.exit({log!r})")
    make_directories(deployment)
    return deployment


SAYS_ITS_RANK = (
    b"(Worker pid=142) INFO 11-30 14:46:12 [a.py:1] world_size=2 rank=1 local_rank=0 x\n"
)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("written", "told"), [(SAYS_ITS_RANK, "b: rank 1 failed"), (b"early\n", "b: a rank failed")]
)
def test_a_rank_that_raised_an_exception_is_told_with_its_host(
    deploy: Deploy, step: Step, written: bytes, told: str
) -> None:
    deployment = whose_server_says(deploy, "rank-raised", **{"10.77.0.2": "127.0.0.2"})
    node, planned = deployment.members[1]
    node.write(planned.directory, [File("ray-logs/worker-a-02000000-142.out", written)])
    StartServer().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        WaitUntilReady().run(deployment, step)
    assert raised.value.message == f"{told} while the deployment was starting"
    assert "SafetensorError: Error while deserializing header" in raised.value.details[2]
    assert raised.value.hint.endswith("/server.log on a")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("name", "replaced"),
    [("rank-raised", {}), ("rank-killed", {"_PP1": "_PP7"})],
)
def test_a_server_that_names_no_rank_of_ours(
    deploy: Deploy, step: Step, name: str, replaced: dict[str, str]
) -> None:
    deployment = whose_server_says(deploy, name, **replaced)
    StartServer().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        WaitUntilReady().run(deployment, step)
    assert raised.value.message == "a: vLLM's server ended while the deployment was starting"


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_ended_is_told_with_its_host(deploy: Deploy, step: Step) -> None:
    deployment = whose_server_says(deploy, "rank-killed")
    StartServer().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        WaitUntilReady().run(deployment, step)
    assert raised.value.host == "b"
    assert raised.value.message == "b: rank 1 ended while the deployment was starting"
    assert "ActorDiedError" in raised.value.details[1]
    assert f"`dmesg -T` there, and `mtppp logs {deployment.file} --node b`" in raised.value.hint
    assert raised.value.hint.endswith(f"{deployment.plan.head.directory}/server.log on a")


@pytest.mark.usefixtures("impatient")
def test_a_ray_that_ended_is_told_with_its_own_log(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    plan = deployment.plan
    second = replace(plan.nodes[1], ray=running(plan.nodes[1].ray, "raise ValueError('ray')"))
    change_plan(deployment, nodes=(plan.nodes[0], second))
    make_directories(deployment)
    StartRay().run(deployment, step)
    StartServer().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        WaitUntilReady().run(deployment, step)
    assert raised.value.message == "b: Ray ended while the deployment was starting"
    assert raised.value.details == ("b ray: ValueError: ray",)


def whose_ray_ends(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Where Ray of the second node ends while the launch waits for all nodes to join."""
    monkeypatch.setattr(ray_cluster, "_LOOK_AT_NODES", 0.05)
    deployment = deploy()
    plan = deployment.plan
    second = replace(plan.nodes[1], ray=running(plan.nodes[1].ray, "raise ValueError('ray')"))
    change_plan(deployment, nodes=(plan.nodes[0], second), placement=running(plan.placement, SLEEP))
    return deployment


def test_nothing_of_the_launch_before_is_told(
    deploy: Deploy, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = whose_ray_ends(deploy, monkeypatch)
    error = b"ValueError: of the launch before\n"
    for node, planned in deployment.members:
        logs = ("server.log", "server.log.1", "ray.log", "ray-logs/worker-1-0a-7.err")
        node.write(planned.directory, [File(name, error) for name in logs])
    ShipPlugins().run(deployment, step)
    StartRay().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        Place().run(deployment, step)
    assert raised.value.details == ("b ray: ValueError: ray",)
    kept = Path(deployment.plan.nodes[1].directory)
    for name in ("server.log", "ray.log", "ray-logs"):
        held = kept / f"{name}.before"
        assert (held / "worker-1-0a-7.err" if held.is_dir() else held).read_bytes() == error


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_never_ready(
    deploy: Deploy, step: Step, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deploy(serve={"port": free_port, "stall_timeout": 1})
    monkeypatch.setattr(serve, "_LOOK_AT_NODES", 60.0)
    make_directories(deployment)
    StartServer().run(deployment, step)
    with pytest.raises(HostTimeout) as raised:
        WaitUntilReady().run(deployment, step)
    assert raised.value.message == (
        "a: the server's log has said nothing new for 1 s, and it is not ready"
    )
    assert raised.value.hint.endswith("raise serve.stall_timeout")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            'print(\'{"problem": "10.0.0.2 has not joined"}\'); raise SystemExit(1)',
            "a: the ranks could not be placed: 10.0.0.2 has not joined",
        ),
        (
            "raise ConnectionError('no GCS')",
            "a: the ranks could not be placed: the command that reserves their GPUs failed",
        ),
    ],
)
def test_a_placement_that_fails(deploy: Deploy, step: Step, script: str, message: str) -> None:
    deployment = deploy()
    plan = deployment.plan
    change_plan(deployment, placement=running(plan.placement, script))
    make_directories(deployment)
    node, planned = deployment.members[1]
    node.write(planned.directory, [File("ray.log", b"fine\nRayError: no\n")])
    with pytest.raises(RemoteCommandFailed) as raised:
        Place().run(deployment, step)
    assert raised.value.message == message
    assert raised.value.details[-1] == "b: RayError: no"


def test_a_ray_that_ends_while_the_others_are_waited_for(
    deploy: Deploy, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = whose_ray_ends(deploy, monkeypatch)
    make_directories(deployment)
    StartRay().run(deployment, step)
    with pytest.raises(RemoteCommandFailed) as raised:
        Place().run(deployment, step)
    assert raised.value.message == "b: Ray ended while the deployment was starting"
    assert raised.value.details == ("b ray: ValueError: ray",)


def test_who_is_waited_for_is_told(
    deploy: Deploy, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_LOOK_AT_NODES", 0.05)
    deployment = deploy()
    plan = deployment.plan
    joins = running(plan.nodes[0].ray, f"print('Ray runtime started.'); {SLEEP}")
    placed = "import os, time\nwhile not os.path.exists('all'): time.sleep(0.01)\nprint('{}')"
    change_plan(
        deployment,
        nodes=(replace(plan.nodes[0], ray=joins), plan.nodes[1]),
        placement=running(plan.placement, placed),
    )
    first, second = (Path(planned.directory) for _, planned in deployment.members)
    told: list[str] = []

    def progress(text: str) -> None:
        told.append(text)
        if text == "waiting for Ray on b":
            with (second / "ray.log").open("a") as log:
                log.write("Ray runtime started.\n")
        if text == "all nodes have joined":
            (first / "all").touch()

    monkeypatch.setattr(step, "progress", progress)
    make_directories(deployment)
    StartRay().run(deployment, step)
    Place().run(deployment, step)
    said = [text for text in dict.fromkeys(told) if text != "waiting for Ray on a, b"]
    assert said == ["waiting for Ray on b", "all nodes have joined"]


@pytest.mark.usefixtures("impatient")
def test_saying_the_same_again_is_no_progress(deploy: Deploy, step: Step, free_port: int) -> None:
    deployment = deploy(server=STUCK, serve={"port": free_port, "stall_timeout": 2})
    make_directories(deployment)
    StartServer().run(deployment, step)
    with pytest.raises(HostTimeout):
        WaitUntilReady().run(deployment, step)


def test_a_placement_says_where_stages_are(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    plan = deployment.plan
    change_plan(deployment, placement=running(plan.placement, "print('{}')"))
    make_directories(deployment)
    Place().run(deployment, step)
    assert step.note == "stage 0 on a, stage 1 on b"


def attested(deployment: Deployment) -> list[dict[str, Any]]:
    plan = deployment.plan
    return [
        {
            "rank": rank.rank,
            "stage": rank.stage,
            "tensor_rank": rank.tensor_rank,
            "address": plan.nodes[rank.node].address,
            "layers": list(
                range(plan.stages[rank.stage].first_layer, plan.stages[rank.stage].last_layer + 1)
            ),
            "drafter": "MTP" if plan.stages[rank.stage].drafter else None,
            "runner_v2": True,
            "executor": "ray",
            "async_scheduling": True,
            "invariants": plan.invariants,
            "vllm": plan.vllm,
            "plugins": os.path.basename(plan.nodes[rank.node].plugins),  # noqa: PTH119
            "patches": patches_in_place(plan),
            "displaced": [],
            "environment": hashed(plan.nodes[rank.node].ray.env),
        }
        for rank in plan.ranks
    ]


def test_what_ranks_wrote_is_read_and_their_shared_memory_kept(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    for (node, planned), record in zip(deployment.members, attested(deployment), strict=True):
        path = f"attest/rank-{record['rank']:04d}.json"
        node.write(planned.directory, [File(path, json.dumps(record).encode())])
    Attest().run(deployment, step)
    assert step.note == "2 ranks are as planned"
    assert Path(deployment.plan.head.directory, "shared-memory.json").read_text() == "[]"


def test_a_rank_that_did_not_write_is_told(deploy: Deploy, step: Step) -> None:
    deployment = deploy()
    with pytest.raises(MtpppError) as raised:
        Attest().run(deployment, step)
    assert raised.value.message == "the ranks are not what was planned"
    assert raised.value.hint.endswith(f"mtppp logs {deployment.file} --rank RANK")
    assert raised.value.details == (
        "rank 0 on a: nothing attested",
        "rank 1 on b: nothing attested",
    )


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"rank": null}', b'{"rank": "x"}'])
def test_a_record_that_is_none_is_told(deploy: Deploy, step: Step, text: bytes) -> None:
    deployment = deploy()
    node, planned = deployment.head
    node.write(planned.directory, [File("attest/rank-0000.json", text)])
    with pytest.raises(RemoteCommandFailed) as raised:
        Attest().run(deployment, step)
    path = f"{planned.directory}/attest/rank-0000.json"
    assert raised.value.message == f"a: {path} is no record of a rank"


RETITLED = """
import setproctitle, time
setproctitle.setproctitle("ray::Worker" + "x" * 4000)
print("up")
time.sleep(600)
"""


@pytest.mark.vllm
def test_a_process_that_retitles_itself_as_ray_does_keeps_its_mark(
    deploy: Deploy, vllm_python: Callable[[str], Path]
) -> None:
    deployment = deploy()
    make_directories(deployment)
    node, planned = deployment.head
    argv = [str(vllm_python("0.32.0")), "-u", "-c", RETITLED]
    node.start(
        role="ray", argv=argv, env=planned.ray.env, directory=planned.directory, log="ray.log"
    )
    log = Path(planned.directory, "ray.log")
    while "up" not in log.read_text():
        time.sleep(0.01)
    [process] = node.processes(planned.directory)["marked"]
    assert process["command"].startswith("ray::Worker")
    assert node.stop(planned.directory, grace={}, segments_file="none")["running"] == 1
