"""The command as a person runs it: exit statuses, messages, and never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from mtppp import __version__

GLM: dict[str, Any] = {
    "name": "glm-5.2",
    "model": {"id": "zai-org/GLM-5.2-FP8"},
    "nodes": [
        {"host": "h100-a", "address": "10.0.0.1", "gpus": 8},
        {"host": "h100-b", "address": "10.0.0.2", "gpus": 8},
    ],
    "runtime": {"vllm": "0.32.0", "python": "/opt/vllm/bin/python"},
    "parallel": {"tensor": 8, "pipeline": 2},
    "speculative": {"tokens": 3},
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return {**kept, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def mtppp(
    tmp_path: Path, environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command in an empty directory; fails on a traceback, whatever comes of it."""

    def run(*arguments: str | bytes, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "mtppp", *arguments],
            cwd=tmp_path,
            env=environment | env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    """Writes cluster.yaml, the GLM-5.2 one with these top-level keys changed."""

    def write(**changes: Any) -> None:
        content = {key: value for key, value in (GLM | changes).items() if value is not None}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    return write


Mtppp = Callable[..., subprocess.CompletedProcess[str]]


def test_help_lists_the_commands(mtppp: Mtppp) -> None:
    done = mtppp("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "launch Launch a deployment and check its first tokens.",
        "status Say what runs where, and whether tokens come.",
        "stop End a deployment, and only what it started.",
    ):
        assert line in " ".join(done.stdout.split())
    assert mtppp("launch", "-h").returncode == 0


def test_version(mtppp: Mtppp) -> None:
    assert mtppp("--version").stdout == f"mtppp, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lanch"], "No such command 'lanch'"),
        (["launch", "a", "b"], "unexpected extra argument"),
        (["launch", "--no-such-flag"], "No such option"),
    ],
)
def test_invalid_usage(mtppp: Mtppp, arguments: list[str], said: str) -> None:
    done = mtppp(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr


@pytest.mark.parametrize("command", ["launch", "stop"])
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("absent.yaml", "error: absent.yaml: no such file\n"),
        ("[red]:x:[/].yaml", "error: [red]:x:[/].yaml: no such file\n"),
        ("./", "error: .: is a directory\n"),
        ("absent", "error: absent: no such file, and no deployment of that name was launched from"),
        ("", "error: : no such file, and no deployment of that name was launched from here\n"),
        ("x" * 300, f"error: {'x' * 300}: no such file, and no deployment of that name was"),
        (b"\xff.yaml", "error: \\udcff.yaml: no such file\n"),
    ],
)
def test_a_file_that_is_not_there(
    mtppp: Mtppp, command: str, argument: str | bytes, said: str
) -> None:
    done = mtppp(command, argument)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert "\nhint: " in done.stderr


def test_nothing_is_named_and_nothing_is_known(mtppp: Mtppp) -> None:
    done = mtppp("launch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: there is no cluster.yaml here, and 0 deployments are known\n"
        "hint: make one: mtppp init, or mtppp import\n"
    )
    assert mtppp("list", "--json").stdout == "[]\n"


def test_an_invalid_file_names_the_line(mtppp: Mtppp, write: Callable[..., None]) -> None:
    write(nods=[], parallel={"tensor": 0})
    done = mtppp("launch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cluster.yaml has 2 problems\n  │ cluster.yaml:")


def test_a_secret_that_is_not_set_matters_to_launch_alone(
    mtppp: Mtppp, write: Callable[..., None]
) -> None:
    name = f"t{uuid4().hex[:8]}"
    nodes = [{"host": "here", "address": "127.0.1.9", "transport": "local", "gpus": 1}]
    write(
        name=name,
        nodes=nodes,
        secrets=["HF_TOKEN"],
        runtime={"vllm": "0.32.0", "python": sys.executable},
        parallel=None,
    )
    done = mtppp("launch")
    assert done.returncode == 2
    assert done.stderr == (
        "error: cluster.yaml: secrets: HF_TOKEN is not set in your environment\n"
        "hint: export HF_TOKEN, or remove it from the file\n"
    )
    stopped = mtppp("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert f"{name} was not running" in stopped.stderr


def test_a_key_file_that_is_not_there_is_told_before_any_host_is_touched(
    mtppp: Mtppp, write: Callable[..., None]
) -> None:
    write(ssh={"identity_file": "~/.ssh/absent"})
    for command in ("launch", "status", "stop"):
        done = mtppp(command)
        assert (done.returncode, done.stdout) == (2, "")
        assert "error: cluster.yaml: ssh.identity_file: there is no file /" in done.stderr
        assert "/.ssh/absent\nhint: name a private key that is there" in done.stderr
    nodes = [GLM["nodes"][0], {**GLM["nodes"][1], "identity_file": "absent"}]
    write(nodes=nodes)
    assert "error: cluster.yaml: nodes[1].identity_file: there is no " in mtppp("status").stderr


def test_what_is_not_proven_is_refused_before_any_host_is_touched(
    mtppp: Mtppp, write: Callable[..., None]
) -> None:
    write(runtime={**GLM["runtime"], "vllm": "0.23.0"})
    done = mtppp("launch")
    assert (done.returncode, done.stdout) == (4, "")
    first, *rest = done.stderr.splitlines()
    assert first.startswith("  ✗ model")
    assert rest == [
        "error: glm_moe_dsa on vLLM 0.23.0: glm_moe_dsa under pipeline parallelism has not been"
        " proven on vLLM 0.23.0",
        "hint: run it with pipeline: 1, or choose a release on which it is proven"
        " (`mtppp patches`); `at_own_risk: [unlisted_family]` goes ahead all the same",
    ]


def test_what_was_never_filled_in_is_not_launched(mtppp: Mtppp, write: Callable[..., None]) -> None:
    write(nodes=[GLM["nodes"][0], {"host": "h100-b", "address": "192.0.2.2", "gpus": 8}])
    planned, launched = mtppp("plan"), mtppp("launch")
    assert (planned.returncode, launched.returncode) == (2, 2)
    assert "fill in: nodes[1].address: 192.0.2.2 only holds the place of h100-b" in planned.stdout
    assert "Nothing speaks against" not in planned.stdout
    assert "cluster.yaml is not filled in: nodes[1].address: 192.0.2.2" in launched.stderr
    assert "connect" not in launched.stderr
    exported = mtppp("export", "cluster.yaml")
    assert exported.returncode == 2
    assert "not filled in: nodes[1].address" in exported.stderr


def test_a_risk_that_is_spelled_out_goes_ahead(mtppp: Mtppp, write: Callable[..., None]) -> None:
    nodes = [{"host": "here", "address": "127.0.1.9", "transport": "local", "gpus": 8}]
    write(
        nodes=nodes,
        parallel={"tensor": 4, "pipeline": 2},
        runtime={**GLM["runtime"], "vllm": "0.23.0"},
        at_own_risk=["unlisted_family"],
    )
    done = mtppp("launch")
    assert done.returncode == 1
    assert "✓ model" in done.stderr
    assert "✓ connect" in done.stderr
    assert "error: here: there is no python at /opt/vllm/bin/python\n" in done.stderr
    assert "hint: set runtime.python to the python" in done.stderr


def test_a_host_that_is_not_reached_is_named(mtppp: Mtppp, write: Callable[..., None]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        nodes = [{"host": "127.0.0.1", "address": "127.0.1.9", "port": port, "gpus": 16}]
        write(nodes=nodes, at_own_risk=["unlisted_family"])
        done = mtppp("launch")
        asked = mtppp("status")
    assert done.returncode == 1
    assert "error: 127.0.0.1: " in done.stderr
    assert f"  127.0.0.1: could not be asked: port {port}: connection refused" in asked.stdout
    assert done.stderr.splitlines()[-1] == "hint: Is sshd running there?"
    assert "    hint: Is sshd running there?\n" in asked.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"data-parallel-size": "2"}, "serve.args.data-parallel-size: must be a whole number"),
        ({"enable-eplb": "no"}, "serve.args.enable-eplb: must be true or false"),
        ({"max-model-len": "1e400"}, "serve.args.max-model-len: must be a number of tokens"),
        ({"gpu-memory-utilization": 92}, "serve.args.gpu-memory-utilization: must be a number"),
    ],
)
def test_a_flag_of_the_wrong_kind(
    mtppp: Mtppp, write: Callable[..., None], tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    write(serve={"args": args})
    line = 1 + (tmp_path / "cluster.yaml").read_text().splitlines().index("  args:") + 1
    done = mtppp("plan")
    assert done.returncode == 2
    assert f"error: cluster.yaml:{line}: {said}" in done.stderr


def test_a_number_that_is_too_large(mtppp: Mtppp, write: Callable[..., None]) -> None:
    write(serve={"port": int("9" * 23)}, gpus_per_node=int("9" * 23))
    done = mtppp("plan")
    assert f"serve.port: must be at most 65535; is {'9' * 23}" in done.stderr
    assert f"gpus_per_node: must be at most 1000000; is {'9' * 23}" in done.stderr
    assert "error: cluster.yaml has 2 problems" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "--json"], ["list", "--json"], ["patches"], ["--help"]]
)
def test_output_that_cannot_be_written(
    environment: dict[str, str], tmp_path: Path, write: Callable[..., None], arguments: list[str]
) -> None:
    write()

    def run(output: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mtppp", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )

    with Path("/dev/full").open("w") as full:
        done = run(full.fileno())
    *_, last = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert last == "error: standard output cannot be written: No space left on device"
    assert done.returncode == 1
    reading, writing = os.pipe()
    os.close(reading)
    done = run(writing)
    os.close(writing)
    assert "error" not in done.stderr.lower()
    assert done.returncode == 128 + signal.SIGPIPE


def test_colour_is_left_out(mtppp: Mtppp, write: Callable[..., None]) -> None:
    write()
    assert "\x1b" not in mtppp("launch", NO_COLOR="1").stderr


def test_an_interrupted_launch_says_so(
    tmp_path: Path, environment: dict[str, str], write: Callable[..., None]
) -> None:
    """A host that takes the connection and says nothing: mtppp waits for it until interrupted."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        nodes = [{"host": "127.0.0.1", "address": "127.0.1.9", "port": port, "gpus": 16}]
        write(nodes=nodes, at_own_risk=["unlisted_family"], ssh={"connect_timeout": 3})
        launch = subprocess.Popen(
            [sys.executable, "-m", "mtppp", "launch"],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4) == b"SSH-"  # from now on it waits for the answer
            launch.send_signal(signal.SIGINT)
            _, said = launch.communicate(timeout=60)
    assert launch.returncode == 130
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said


def test_help_fits_a_narrow_terminal(
    mtppp: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    lines = mtppp("--help", COLUMNS="40").stdout.splitlines()
    assert max(map(len, lines)) <= 40
