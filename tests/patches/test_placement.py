"""The placement group of a deployment, with real Ray on one node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from mtppp_patches.engine_spec import SPEC_VARIABLE, EngineSpec

PATCHES = Path(__file__).parents[2] / "patches"
ADDRESS = "127.0.9.1"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Ray:
    """A Ray of one node and one GPU, and commands that ask it for groups."""

    def __init__(self, python: Path, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind((ADDRESS, 0))
            self._port = probe.getsockname()[1]
        self._python, self._directory = str(python), directory
        placement = {"namespace": "tests", "group": "ours", "addresses": [ADDRESS]}
        spec = EngineSpec(
            release="0.32.0", model_type="glm4_moe", patches=("placement",), placement=placement
        )
        self._env = os.environ | {
            "PYTHONPATH": str(PATCHES),
            "RAY_ADDRESS": f"{ADDRESS}:{self._port}",
            "RAY_gcs_server_request_timeout_seconds": "1",
            SPEC_VARIABLE: spec.to_json(),
        }
        self._started: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        env = {name: value for name, value in self._env.items() if name != "RAY_ADDRESS"}
        argv = [
            self._python, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            f"--node-ip-address={ADDRESS}", f"--port={self._port}", "--num-gpus=1",
            "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats",
            f"--temp-dir={self._directory}", "--object-store-memory=100000000",
        ]  # fmt: skip
        self._run(argv, env)

    def raylet(self) -> int:
        """Its raylet, as soon as there is one."""
        found: list[int] = []

        def look() -> bool:
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    program, *arguments = file.read_bytes().split(b"\0")
                    if program.endswith(b"/raylet") and str(self._directory).encode() in b"".join(
                        arguments
                    ):
                        found.append(int(file.parts[2]))
            return bool(found)

        wait_for(look)
        return found[0]

    def place(self) -> subprocess.Popen[str]:
        argv = [self._python, "-m", "mtppp_patches.placement", "--timeout=300"]
        return self._run(argv, dict(self._env))

    def _run(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        self._started.append(
            subprocess.Popen(
                argv,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        )
        return self._started[-1]

    def end(self) -> None:
        for process in self._started:
            # Asked to end, Ray takes half a minute.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def ray(vllm_python: Callable[[str], Path]) -> Iterator[Ray]:
    directory = Path(f"/tmp/mtppp-{uuid4().hex[:8]}")  # sockets below it have a short way
    ray = Ray(vllm_python("0.32.0"), directory)
    yield ray
    ray.end()
    shutil.rmtree(directory, ignore_errors=True)


def told(placing: subprocess.Popen[str]) -> tuple[int, object]:
    said, _ = placing.communicate(timeout=400)
    return placing.returncode, json.loads(said)["problem"]


def test_a_first_raylet_that_registers_late_is_waited_for(ray: Ray) -> None:
    ray.start()
    raylet = ray.raylet()
    os.kill(raylet, signal.SIGSTOP)
    placing = ray.place()
    wait_for(lambda: "_raylet" in Path(f"/proc/{placing.pid}/maps").read_text())
    time.sleep(3)  # longer than Ray itself is told to wait
    assert placing.poll() is None
    os.kill(raylet, signal.SIGCONT)
    assert told(placing) == (0, None)
    # Its GPU is reserved: only in place of the group that has it can there be another.
    assert told(ray.place()) == (0, None)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
