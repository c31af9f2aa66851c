"""`mtppp logs -f`, as a process that is read and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mtppp.cli.main import cli


@pytest.fixture
def file(tmp_path: Path, run_directory: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster file of one node, whose server has written a line."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    node = {"host": "a", "address": "127.0.1.1", "transport": "local", "gpus": 1}
    content = {
        "name": run_directory.split("/")[-2],
        "model": {"id": "/models/m"},
        "nodes": [node],
        "runtime": {"vllm": "0.32.0", "python": sys.executable},
    }
    path.write_text(yaml.safe_dump(content))
    log = Path(run_directory, "server.log")
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    return path


def test_what_is_written_is_followed_until_it_is_interrupted(
    file: Path, run_directory: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mtppp", "logs", "-f", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a server | first\n"
        with Path(run_directory, "server.log").open("a") as out:
            out.write("second\n")
        assert process.stdout.readline() == "a server | second\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "interrupted"


@pytest.mark.parametrize(
    ("since", "shown"),
    [
        *(("100s", False), ("90m", False), ("1h", False), ("1d", True), ("3h", True)),
        *(("2020-01-01T00:00:00", True), ("2100-01-01", False), (None, True)),
    ],
)
def test_what_is_older_is_left_out(
    file: Path, run_directory: str, since: str | None, shown: bool
) -> None:
    two_hours_ago = time.time() - 7200
    os.utime(Path(run_directory, "server.log"), (two_hours_ago, two_hours_ago))
    options = ["--since", since] if since else []
    done = CliRunner().invoke(cli, ["logs", str(file), *options])
    assert done.exit_code == 0
    assert done.stdout == ("a server | first\n" if shown else "")


def test_of_a_rank_that_no_line_is_known_to_be_of_it_is_said(file: Path) -> None:
    done = CliRunner().invoke(cli, ["logs", str(file), "--rank", "0"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("no line is known to be of rank 0: ")
