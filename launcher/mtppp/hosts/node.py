"""A node of the cluster: a transport, and the operations that its agent carries out there."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

from mtppp.errors import HostError, Locked, RemoteCommandFailed
from mtppp.hosts.facts import HostFacts
from mtppp.hosts.lock import Holder, in_words, lock_name
from mtppp.hosts.transport import Completed, Held, Transport

# Expands a leading "~/", tells "no such python" from every other failure, then runs the source
# that is the first line of standard input.
# One line: csh, as a login shell, knows no end of line in quotes.
_START = (
    "python=$1;"
    ' case $python in "~/"*) python=$HOME/${python#"~/"};; esac;'
    ' [ -f "$python" ] && [ -x "$python" ] || { echo "no python at $python" >&2; exit 127; };'
    """ exec "$python" -I -c 'import sys; exec(compile(eval(sys.stdin.readline()), "agent","""
    """ "exec"))'"""
)
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
        self._lock: _Lock | None = None

    @property
    def host(self) -> str:
        return self.transport.host

    def lock(self, index: int, holder: Holder, *, claim: str | None = None) -> None:
        """Take a deployment's lock, until `unlock`, or until we or the connection end.

        Everything that is asked for meanwhile is carried out only if the lock is still ours. One
        that was lost with the connection is taken again, unless somebody else had it in between.

        Args:
            index: the node's place in the file.
            claim: what no other deployment may have at the same time, whatever its name; see GPUS.

        Raises:
            Locked: somebody else holds it; says who, since when and what for.
        """
        name = lock_name(holder.deployment, index)
        self._lock = self._take(_Lock(name, index, holder, claim, None), resume=False)

    def unlock(self, outcome: str) -> None:
        """Give the lock back; the node's audit log has how the matter ended. Harmless without."""
        lock, self._lock = self._lock, None
        if lock is not None and lock.held is not None:
            lock.held.release(" ".join(outcome.split()).encode() + b"\n")

    def _take(self, lock: _Lock, *, resume: bool) -> _Lock:
        holder = asdict(lock.holder) | {"node": lock.index}
        request = {"op": "hold", "lock": lock.name, "holder": holder, "resume": resume}
        request["claim"] = lock.claim
        held = self.transport.hold(
            self._command, stdin=_stdin(request), answer=b'{"', timeout=20 + _MARGIN
        )
        said = held if isinstance(held, Completed) else Completed(0, held.answer, "")
        try:
            answer = self._answer("hold", said)
            other = answer["held_by"]
            if other is not None and answer.get("claimed"):
                raise _claimed(self.host, other)
            if other is not None:
                raise _locked(self.host, other, lost=resume)
        except HostError:
            if not isinstance(held, Completed):
                held.release(b"")
            raise
        assert not isinstance(held, Completed), "it ended, and yet it holds the lock"
        return replace(lock, held=held)

    def facts(
        self,
        *,
        address: str,
        model_path: str | None,
        ports: Sequence[int],
        hub: Mapping[str, str] | None = None,
    ) -> HostFacts:
        """Ask for all that is known of the host.

        Args:
            hub: `model`, `revision` and `cache` (a directory there) of a model that is not a path.
        """
        request = {"op": "facts", "address": address, "model_path": model_path}
        answer = self._ask(
            {**request, "ports": list(ports), "hub": dict(hub) if hub else None}, timeout=90
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

    def clear(self, directory: str, ray_directory: str | None, names: Sequence[str]) -> None:
        """Remove `names` from a run directory, and Ray's temp-dir if given, keeping Ray's logs."""
        self._ask(
            {
                "op": "clear",
                "directory": directory,
                "ray_directory": ray_directory,
                "names": list(names),
            },
            timeout=60,
        )

    def set_aside(self, directory: str, ray_directory: str, names: Sequence[str]) -> None:
        """Keep logs in a run directory as those of the launch before, with those of Ray's workers
        that have ended."""
        request = {"op": "set_aside", "directory": directory, "ray_directory": ray_directory}
        self._ask({**request, "names": list(names)}, timeout=60)

    def start(
        self,
        *,
        role: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        directory: str,
        log: str,
        logs: str = "",
    ) -> None:
        """Start a process that outlives the session; recorded in the run directory.

        Args:
            logs: a glob of further logs that are to be kept bounded while it runs.
        """
        self._ask(
            {
                "op": "start",
                "role": role,
                "argv": list(argv),
                "env": dict(env),
                "directory": directory,
                "log": log,
                "logs": logs,
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

    def look(self, deployment: str, index: int) -> dict[str, Any]:
        """All that the node knows of a deployment; see the agent's `op_look`."""
        found = self._ask({"op": "look", "deployment": deployment, "node": index}, timeout=90)
        token = (found["held_by"] or {}).get("token")
        if self._lock is not None and token == self._lock.holder.token:
            found["held_by"] = None  # it is we who work on it
        return found

    def weights(self, path: str | None, hub: Mapping[str, str] | None) -> dict[str, Any]:
        """`files`, `bytes` and `sha256` of a model's weights, and its `config`; see the agent."""
        request = {"op": "weights", "path": path, "hub": dict(hub) if hub else None}
        return self._ask(request, timeout=90)

    def gpu_memory(self) -> dict[str, Any]:
        """`used`: bytes on each GPU, or None and perhaps a `reason`."""
        return self._ask({"op": "gpu_memory"}, timeout=60)

    def listeners(self, address: str, ports: Sequence[int]) -> list[tuple[int, str]]:
        """Those of the ports on which something listens, and what that is."""
        request = {"op": "listeners", "address": address, "ports": list(ports)}
        return [(port, by) for port, by in self._ask(request, timeout=60)["taken"]]

    def processes(self, directory: str) -> dict[str, Any]:
        """`recorded`, `marked` and `shared_memory` of a run directory; see the agent."""
        return self._ask({"op": "processes", "directory": directory}, timeout=60)

    def logs(
        self,
        directory: str,
        ray_directory: str,
        *,
        names: Sequence[str],
        since: float,
        limit: int,
        positions: Mapping[str, Sequence[int]],
    ) -> dict[str, Any]:
        """Lines of the node's logs, and `positions` to ask for the next ones; see the agent."""
        return self._ask(
            {
                "op": "logs",
                "directory": directory,
                "ray_directory": ray_directory,
                "names": list(names),
                "since": since,
                "limit": limit,
                "positions": dict(positions),
            },
            timeout=60,
        )

    def stop(
        self,
        directory: str,
        *,
        grace: Mapping[str, float],
        segments_file: str,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """End all that belongs to a run directory: `running`, `killed`, `left`, `unlinked`.

        Args:
            grace: seconds that recorded processes have to end by themselves, by role; all others
                are killed.
            segments_file: a file there that may list further segments of shared memory.
            keep: roles of recorded processes that live on, with their process groups.
        """
        return self._ask(
            {
                "op": "stop",
                "directory": directory,
                "grace": dict(grace),
                "segments_file": segments_file,
                "keep": list(keep),
            },
            timeout=sum(grace.values()) + 60,
        )

    @property
    def _command(self) -> list[str]:
        return ["sh", "-c", _START, "sh", self.python]

    def _ask(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        guard = {} if self._lock is None else self._lock.guard
        stdin = _stdin({**request, **guard})
        done = self.transport.run(self._command, stdin=stdin, timeout=timeout + _MARGIN)
        try:
            return self._answer(request["op"], done)
        except _LockLost:
            # It was not carried out, so it may be asked for once more.
            assert self._lock is not None
            self._lock = self._take(self._lock, resume=True)
        done = self.transport.run(self._command, stdin=stdin, timeout=timeout + _MARGIN)
        return self._answer(request["op"], done)

    def _answer(self, operation: str, done: Completed) -> dict[str, Any]:
        if done.status == 127 and "no python at" in done.stderr:
            raise RemoteCommandFailed(
                self.host,
                f"there is no python at {self.python}",
                hint="set runtime.python to the python of the environment that has vLLM",
            )
        # A login shell may print a greeting first: the answer is the last line.
        try:
            message = json.loads(done.stdout.strip().rpartition("\n")[2])
        except json.JSONDecodeError:
            message = None
        if done.status != 0 or not isinstance(message, dict):
            raise RemoteCommandFailed(
                self.host,
                f"{self.python} could not carry out {operation!r} (exit status {done.status})",
                details=(done.stderr or done.stdout).strip().splitlines()[-5:],
            )
        if "lost" in message:
            raise _LockLost(self.host, "the lock was lost")
        if "error" in message:
            raise RemoteCommandFailed(self.host, f"{operation}: {message['error']}")
        answer: dict[str, Any] = message["answer"]
        return answer


@dataclass(frozen=True, slots=True)
class _Lock:
    name: str
    index: int
    holder: Holder
    claim: str | None
    held: Held | None

    @property
    def guard(self) -> dict[str, str]:
        """What a request says of the lock under which it is asked for."""
        return {"lock": self.name, "token": self.holder.token}


class _LockLost(RemoteCommandFailed):
    """The lock is not held any more; what was asked for was not done."""


def _locked(host: str, other: Mapping[str, Any], *, lost: bool) -> Locked:
    if lost:
        return Locked(
            host,
            f"the lock was lost with the connection, and since then {other['who']} had it"
            f" for {other['what']!r}",
            hint=f"`mtppp status {other.get('deployment', '')}` says what runs now",
        )
    return Locked(
        host,
        in_words(other),
        hint="wait until that has ended, or end that process: its lock goes with it",
    )


def _claimed(host: str, other: Mapping[str, Any]) -> Locked:
    return Locked(
        host,
        f"its GPUs are about to be taken: {in_words(other)}",
        hint="use another host, or stop that deployment once it is launched",
    )


def _stdin(request: Mapping[str, Any]) -> bytes:
    # ASCII, which every locale that python may read it in has.
    return f"{_agent_source()!a}\n{json.dumps(request)}\n".encode("ascii")


def _agent_source() -> str:
    return resources.files("mtppp.hosts").joinpath("agent.py").read_text(encoding="utf-8")
