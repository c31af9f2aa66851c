"""`mtppp logs -f`, as a process that is read and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml


def test_what_is_written_is_followed_until_it_is_interrupted(
    tmp_path: Path, run_directory: str
) -> None:
    file = tmp_path / "cluster.yaml"
    node = {"host": "a", "address": "127.0.1.1", "transport": "local", "gpus": 1}
    content = {
        "name": run_directory.split("/")[-2],
        "model": {"id": "/models/m"},
        "nodes": [node],
        "runtime": {"vllm": "0.32.0", "python": sys.executable},
    }
    file.write_text(yaml.safe_dump(content))
    log = Path(run_directory, "server.log")
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "mtppp", "logs", "-f", str(file)],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a server | first\n"
        with log.open("a") as out:
            out.write("second\n")
        assert process.stdout.readline() == "a server | second\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "interrupted"
