"""The logs of all nodes as one, from files as vLLM and Ray write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.read_logs import LogReader

Deploy = Callable[..., Deployment]

SERVER = """\
(EngineCore pid=30927) INFO 11-29 15:32:01 [ray_utils.py:585] Using the existing placement group
\x1b[36m(RayWorkerProc pid=20809)\x1b[0m (Worker_PP0 pid=20809) INFO 11-29 15:32:19 [a.py:1] loads
\x1b[36m(RayWorkerProc pid=32363, ip=127.0.0.2)\x1b[0m (Worker_PP1 pid=32363) INFO 11-29 15:32:20\
 [a.py:1] loads [repeated 2x across cluster]
\x1b[36m(RayWorkerProc pid=20809)\x1b[0m
(APIServer pid=21609) INFO 11-29 15:32:28 [entry.py:140] Starting vLLM server
"""
RANK_0 = """\
:job_id:02000000
:actor_name:RayWorkerProc
(Worker pid=20809) INFO 11-29 15:32:18 [parallel_state.py:1906] world_size=2 rank=0 local_rank=0 x
(Worker_PP0 pid=20809) INFO 11-29 15:32:19 [a.py:1] loads
"""
RANK_1 = """\
(Worker_PP1 pid=32363) INFO 11-29 15:32:20 [a.py:1] loads
(Worker_PP1 pid=32363) INFO 11-29 15:32:21 [a.py:1] loads the drafter
"""
RANK_1_ERRORS = "[W1129 15:32:18.765188468 utils.cpp:68] Warning: NUMA binding\n"
RAY = "2026-11-29 15:32:00,429\tINFO scripts.py:1251 -- Ray runtime started.\n"


def write(deployment: Deployment) -> None:
    first, second = (Path(planned.directory) for _, planned in deployment.members)
    for path, text in {
        first / "server.log": SERVER,
        first / "ray.log": RAY,
        first / "ray-logs/worker-a-02000000-20809.out": RANK_0,
        second / "ray-logs/worker-b-02000000-32363.out": RANK_1,
        second / "ray-logs/worker-b-02000000-32363.err": RANK_1_ERRORS,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(reader: LogReader) -> list[str]:
    return [f"{line.host} {line.source}: {line.text.rpartition('] ')[2]}" for line in reader.read()]


def test_lines_of_all_nodes_in_the_order_of_time_and_each_once(deploy: Deploy) -> None:
    deployment = deploy()
    write(deployment)
    reader = LogReader(deployment, range(2))
    assert read(reader) == [
        f"a ray: {RAY.strip()}",
        "a server: Using the existing placement group",
        "a rank 0: world_size=2 rank=0 local_rank=0 x",
        "b rank 1: Warning: NUMA binding",
        "a rank 0: loads",
        "b rank 1: loads",
        "b rank 1: loads the drafter",
        "a server: Starting vLLM server",
    ]
    assert reader.problems == {}
    assert read(reader) == []
    with Path(deployment.head[1].directory, "server.log").open("a") as log:
        log.write("(APIServer pid=21609) INFO 11-29 15:33:00 [a.py:1] more\n")
    assert read(reader) == ["a server: more"]


def test_of_a_node_that_cannot_be_read_what_ray_has_sent(deploy: Deploy) -> None:
    deployment = deploy()
    write(deployment)
    deployment.nodes[1] = Node(LocalTransport("b"), "/no/such/python")
    reader = LogReader(deployment, range(2))
    lines = reader.read()
    assert "there is no python at /no/such/python" in reader.problems["b"]
    sent = [line for line in lines if "repeated" in line.text]
    assert [(line.source, line.rank) for line in sent] == [("server", 1)]
    assert sum("[a.py:1] loads" in line.text for line in lines) == 2


def test_one_node_and_since(deploy: Deploy) -> None:
    deployment = deploy()
    write(deployment)
    assert {line.host for line in LogReader(deployment, [1]).read()} == {"b"}
    everything = LogReader(deployment, range(2)).read()
    since = everything[-1].time
    assert LogReader(deployment, range(2), since=since).read() == everything[-1:]
