"""A node of the cluster: a transport, and the operations that its agent carries out there."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mtppp.errors import RemoteCommandFailed
from mtppp.hosts.facts import HostFacts
from mtppp.hosts.transport import Transport

# Expands a leading "~/", tells "no such python" from every other failure, then runs the source
# that is the first line of standard input.
_START = """\
python=$1
case $python in "~/"*) python=$HOME/${python#"~/"};; esac
[ -f "$python" ] && [ -x "$python" ] || { echo "no python at $python" >&2; exit 127; }
exec "$python" -I -c 'import sys; exec(compile(eval(sys.stdin.readline()), "agent", "exec"))'
"""
_MARGIN = 30.0  # seconds for the answer to travel, on top of what an operation may take


@dataclass(frozen=True, slots=True)
class File:
    """A file to write on a node: path relative to a directory, contents, permission bits."""

    path: str
    data: bytes
    mode: int = 0o600


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran on a node; status None when it was given up after its time."""

    status: int | None
    stdout: str
    stderr: str


class Node:
    """Operations on one node. Each is one request to the agent; see `agent.py`.

    Every method raises ConnectFailed or HostTimeout when the host cannot be talked to, and
    RemoteCommandFailed when the host says no.
    """

    def __init__(self, transport: Transport, python: str) -> None:
        self.transport = transport
        self.python = python

    @property
    def host(self) -> str:
        return self.transport.host

    def facts(self, *, address: str, model_path: str | None, ports: Sequence[int]) -> HostFacts:
        answer = self._ask(
            {"op": "facts", "address": address, "model_path": model_path, "ports": list(ports)},
            timeout=90,
        )
        return HostFacts.from_answer(answer)

    def uid(self) -> int:
        """Number of the user we are on the host."""
        return int(self._ask({"op": "uid"}, timeout=20)["uid"])

    def write(self, directory: str, files: Sequence[File]) -> None:
        encoded = [
            {"path": f.path, "data": base64.b64encode(f.data).decode(), "mode": f.mode}
            for f in files
        ]
        self._ask({"op": "write", "directory": directory, "files": encoded}, timeout=60)

    def exists(self, path: str) -> bool:
        return bool(self._ask({"op": "exists", "path": path}, timeout=20)["exists"])

    def read(self, pattern: str, *, limit: int = 1 << 20) -> dict[str, str]:
        """Files matching a glob, by path; of longer ones the last `limit` bytes."""
        answer = self._ask({"op": "read", "pattern": pattern, "limit": limit}, timeout=60)
        return dict(answer["files"])

    def clear(self, directory: str, ray_directory: str, names: Sequence[str]) -> None:
        """Remove `names` from a run directory and Ray's temp-dir, keeping Ray's logs."""
        self._ask(
            {
                "op": "clear",
                "directory": directory,
                "ray_directory": ray_directory,
                "names": list(names),
            },
            timeout=60,
        )

    def start(
        self, *, role: str, argv: Sequence[str], env: Mapping[str, str], directory: str, log: str
    ) -> None:
        """Start a process that outlives the session; recorded in the run directory."""
        self._ask(
            {
                "op": "start",
                "role": role,
                "argv": list(argv),
                "env": dict(env),
                "directory": directory,
                "log": log,
            },
            timeout=60,
        )

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], directory: str, timeout: float
    ) -> Ended:
        """Run a command to its end, for at most `timeout` seconds."""
        answer = self._ask(
            {
                "op": "run",
                "argv": list(argv),
                "env": dict(env),
                "directory": directory,
                "timeout": timeout,
            },
            timeout=timeout,
        )
        return Ended(answer["status"], answer["stdout"], answer["stderr"])

    def processes(self, directory: str) -> dict[str, Any]:
        """`recorded`, `marked` and `shared_memory` of a run directory; see the agent."""
        return self._ask({"op": "processes", "directory": directory}, timeout=60)

    def stop(
        self, directory: str, *, grace: Mapping[str, float], segments_file: str
    ) -> dict[str, Any]:
        """End all that belongs to a run directory: `running`, `killed`, `left`, `unlinked`.

        Args:
            grace: seconds that recorded processes have to end by themselves, by role; all others
                are killed.
            segments_file: a file there that may list further segments of shared memory.
        """
        return self._ask(
            {
                "op": "stop",
                "directory": directory,
                "grace": dict(grace),
                "segments_file": segments_file,
            },
            timeout=sum(grace.values()) + 60,
        )

    def _ask(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        # ASCII, which every locale that python may read it in has.
        stdin = f"{_agent_source()!a}\n{json.dumps(request)}".encode("ascii")
        done = self.transport.run(
            ["sh", "-c", _START, "sh", self.python], stdin=stdin, timeout=timeout + _MARGIN
        )
        if done.status == 127 and "no python at" in done.stderr:
            raise RemoteCommandFailed(
                self.host,
                f"there is no python at {self.python}",
                hint="set runtime.python to the python of the environment that has vLLM",
            )
        return self._answer(request["op"], done.status, done.stdout, done.stderr)

    def _answer(self, operation: str, status: int, stdout: str, stderr: str) -> dict[str, Any]:
        # A login shell may print a greeting first: the answer is the last line.
        try:
            message = json.loads(stdout.strip().rpartition("\n")[2])
        except json.JSONDecodeError:
            message = None
        if status != 0 or not isinstance(message, dict):
            raise RemoteCommandFailed(
                self.host,
                f"{self.python} could not carry out {operation!r} (exit status {status})",
                details=(stderr or stdout).strip().splitlines()[-5:],
            )
        if "error" in message:
            raise RemoteCommandFailed(self.host, f"{operation}: {message['error']}")
        answer: dict[str, Any] = message["answer"]
        return answer


def _agent_source() -> str:
    return resources.files("mtppp.hosts").joinpath("agent.py").read_text(encoding="utf-8")
