"""A node as the launcher sees it, over the transport to this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtppp.errors import RemoteCommandFailed
from mtppp.hosts.facts import GpuFacts, HostFacts, RdmaPort
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.node import Ended, File, Node
from mtppp.hosts.transport import Completed


@pytest.fixture
def node() -> Node:
    return Node(LocalTransport("here"), sys.executable)


class Recorded:
    """A transport that answers as it is told, and keeps what it was asked."""

    host = "there"

    def __init__(self, status: int, stdout: str, stderr: str = "") -> None:
        self._completed = Completed(status, stdout, stderr)
        self.argv: Sequence[str] = ()
        self.stdin = b""
        self.timeout = 0.0

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        self.argv, self.stdin, self.timeout = argv, stdin, timeout
        return self._completed


def test_files_go_there_and_come_back(node: Node, run_directory: str) -> None:
    node.write(run_directory, [File("a.json", b"{}"), File("b/c", b"\xff", 0o755)])
    assert node.exists(f"{run_directory}/b/c")
    assert not node.exists(f"{run_directory}/d")
    assert node.read(f"{run_directory}/*.json") == {f"{run_directory}/a.json": "{}"}
    node.clear(run_directory, f"{run_directory}-ray", ["b"])
    assert [path.name for path in Path(run_directory).iterdir()] == ["a.json"]


def test_commands_and_processes(node: Node, run_directory: str) -> None:
    env = {"MTPPP_RUN_DIR": run_directory, "SECRET": "in no command line"}
    node.write(run_directory, [])
    script = "import os; print(os.environ['SECRET'])"
    ended = node.run([sys.executable, "-c", script], env=env, directory=run_directory, timeout=30)
    assert ended == Ended(0, "in no command line\n", "")
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    node.start(role="ray", argv=sleep, env=env, directory=run_directory, log="ray.log")
    [entry] = node.processes(run_directory)["recorded"]
    assert (entry["role"], entry["alive"]) == ("ray", True)
    stopped = node.stop(run_directory, grace={"server": 5.0}, segments_file="none")
    assert (stopped["running"], stopped["left"]) == (1, [])


def test_facts(node: Node) -> None:
    facts = node.facts(address="127.0.0.1", model_path=None, ports=[])
    assert facts.python == sys.executable
    assert facts.uid == node.uid()
    assert facts.vllm_release is None


def test_what_travels() -> None:
    transport = Recorded(0, '{"answer": {"uid": 7}}\n')
    assert Node(transport, "~/vllm/bin/python").uid() == 7
    assert transport.argv[:2] == ["sh", "-c"]
    assert "\n" not in transport.argv[2]  # which csh could not read, as a login shell
    assert transport.argv[3:] == ["sh", "~/vllm/bin/python"]
    source, _, request = transport.stdin.partition(b"\n")
    assert b"def op_uid()" in source
    assert json.loads(request) == {"op": "uid"}
    assert transport.timeout == 50


def test_a_python_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = LocalTransport("here")
    home = transport.run(["sh", "-c", "echo $HOME"], timeout=20).stdout.strip()
    python = f"~/{Path(sys.executable).relative_to('/')}"
    with pytest.raises(RemoteCommandFailed) as raised:
        Node(transport, python).uid()
    assert raised.value.message == f"here: there is no python at {python}"
    assert home not in python


@pytest.mark.parametrize("python", ["/no/such/python", "/etc", "/etc/passwd"])
def test_there_is_no_python(python: str) -> None:
    with pytest.raises(RemoteCommandFailed) as raised:
        Node(LocalTransport("here"), python).uid()
    assert raised.value.message == f"here: there is no python at {python}"
    assert raised.value.hint == (
        "set runtime.python to the python of the environment that has vLLM"
    )


def test_a_greeting_before_the_answer_is_passed_over() -> None:
    transport = Recorded(0, 'Welcome!\n{"not": "this"}\n{"answer": {"uid": 7}}\n')
    assert Node(transport, "/python").uid() == 7


def test_what_the_host_says_no_to() -> None:
    transport = Recorded(0, '{"error": "/var/tmp/mtppp-7 belongs to user 0: have it removed"}\n')
    with pytest.raises(RemoteCommandFailed) as raised:
        Node(transport, "/python").uid()
    assert raised.value.message == (
        "there: uid: /var/tmp/mtppp-7 belongs to user 0: have it removed"
    )


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "details"),
    [
        (1, "", "a\nb\nc\nd\ne\nSyntaxError: invalid syntax\n", ("b", "c", "d", "e")),
        (0, "", "", ()),
        (0, "bye\n", "", ("bye",)),
        (0, "[]\n", "", ("[]",)),
        (137, '{"answer": {}}\n', "Killed\n", ("Killed",)),
    ],
)
def test_an_answer_that_makes_no_sense(
    status: int, stdout: str, stderr: str, details: tuple[str, ...]
) -> None:
    with pytest.raises(RemoteCommandFailed) as raised:
        Node(Recorded(status, stdout, stderr), "/python").uid()
    assert raised.value.message == (
        f"there: /python could not carry out 'uid' (exit status {status})"
    )
    assert raised.value.details[: len(details)] == details
    assert len(raised.value.details) <= 5


def test_host_facts_of_an_answer() -> None:
    facts = HostFacts.from_answer(
        {
            "hostname": "h",
            "user": "u",
            "uid": 1,
            "path": "/bin",
            "python": "/python",
            "python_version": "3.11.7",
            "versions": {"vllm": "0.32.0+cpu", "ray": None, "torch": None},
            "interface": None,
            "addresses": [["lo", "127.0.0.1"]],
            "gpus": [{"name": "H100", "memory": 1, "compute_capability": "9.0"}],
            "deployments": [
                {"directory": "/r/other/0", "device": "cuda", "by": "a@b", "since": "T"}
            ],
            "ports_taken": [[1, "pid 7: nginx"]],
            "ports_forbidden": [2],
            "shm_bytes": 3,
            "model_path": None,
            "model_config": None,
            "rdma": [
                {
                    "device": "mlx5_0",
                    "port": 1,
                    "active": True,
                    "link_layer": "InfiniBand",
                    "near": [0],
                }
            ],
            "limits": {"nofile": 1024, "memlock": None},
        }
    )
    assert facts.vllm_release == "0.32.0"
    assert facts.addresses == (("lo", "127.0.0.1"),)
    assert facts.gpus == (GpuFacts("H100", 1, "9.0"),)
    assert facts.rdma == (RdmaPort("mlx5_0", 1, True, "InfiniBand", (0,)),)
    assert facts.rdma[0].name == "mlx5_0:1"
    assert (facts.ports_taken, facts.ports_forbidden) == (((1, "pid 7: nginx"),), (2,))
