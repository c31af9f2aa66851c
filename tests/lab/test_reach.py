"""Hosts that the operator reaches through others only, and the endpoint there."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployments import COMMAND, Server, cluster_file, launched, mtppp
from lab_driver import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

MODEL = "demo-glm4-moe"
NODES = ["n3", "n4"]


@pytest.fixture
def behind(spare_lab: Lab) -> Lab:
    """n1 is all that the operator reaches, n3 and n4 are reached from n2, and n2 from n1."""
    spare_lab.up(4)
    for one, other in (
        ("operator", "n2"),
        ("operator", "n3"),
        ("operator", "n4"),
        ("n1", "n3"),
        ("n1", "n4"),
    ):
        spare_lab.part(one, other)
    return spare_lab


def file_behind(directory: Path, lab: Lab, python: Path, **ssh: str) -> Path:
    return cluster_file(
        directory,
        lab,
        hosts=NODES,
        model=MODEL,
        python=python,
        name="behind",
        ssh={"config_file": str(lab.ssh_config), "proxy_jump": "n1,n2"} | ssh,
    )


def test_tokens_through_two_jump_hosts(
    behind: Lab, tmp_path: Path, vllm_python: Callable[[str], Path]
) -> None:
    file = file_behind(tmp_path, behind, vllm_python("0.32.0"))
    with launched(file) as server:
        assert "asked through ssh to n3" in server.said
        assert "that cannot be reached from here: mtppp forward behind" in server.said
        status = json.loads(mtppp("status", "behind", "--json").stdout)
        assert [status["state"], status["reachable"]] == ["serving", False]
        logs = mtppp("logs", "behind").stdout.splitlines()
        assert {line.partition(" | ")[0] for line in logs} >= {
            "n3 server",
            "n3 ray",
            "n4 ray",
            "n3 rank 0",
            "n4 rank 1",
        }
        assert not [line for line in logs if "(RayWorkerProc" in line]
        second = mtppp("logs", "behind", "--rank", "1", "--since", "1h").stdout.splitlines()
        assert second == [line for line in logs if line.startswith("n4 rank 1 | ")]
        with forwarded("behind") as url:
            [answer] = Server(url, MODEL).greedy(["count 3 by 4: 3 7"], 8)
            assert answer.tokens


def test_every_jump_host_must_be_known(behind: Lab, tmp_path: Path) -> None:
    known = (behind.ssh_config.parent / "known_hosts").read_text().splitlines()
    strangers = tmp_path / "known_hosts"
    strangers.write_text("\n".join(line for line in known if not line.startswith("n2,")))
    file = file_behind(tmp_path, behind, Path("/usr/bin/python3"), known_hosts=str(strangers))
    done = mtppp("launch", str(file))
    assert done.returncode == 1
    assert "jump host n2:22" in done.stderr
    assert "unknown host key" in done.stderr


@contextmanager
def forwarded(name: str) -> Iterator[str]:
    """`mtppp forward` at a free port, ended by Ctrl-C."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [*COMMAND, "forward", name, "--port", str(port)]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert f"http://127.0.0.1:{port}/v1 leads to {name} on n3" in said
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
