"""One node's managed environment: looked at, and made where there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from mtppp.errors import RemoteCommandFailed
from mtppp.hosts.node import File, Node
from mtppp.phases.logs import telling_lines
from mtppp.plan import directories
from mtppp.runtime.lock import Lock

_LOOK_TIMEOUT = 60.0
_MAKER = "maker.py"
_LOCK = "lock.txt"
_LOG = "environment.log"
_ROLE = "environment"


class EnvironmentMaker:
    """Makes it with the Python that the node answers with so far.

    Attributes:
        held: what is in the environment; None while there is none.
        python: version of the Python that would make one.
        runs: whether one is being made.
        said: the last line of the log.
    """

    def __init__(
        self,
        node: Node,
        *,
        deployment: str,
        index: int,
        lock: Lock,
        wheelhouse: str | None,
        env: Mapping[str, str],
    ) -> None:
        self.node = node
        self.base = node.python
        self.held: Mapping[str, Any] | None = None
        self.python = ""
        self.runs = False
        self.said = "starts"
        self._lock = lock
        self._wheelhouse = wheelhouse
        self._env = dict(env)
        self._deployment, self._index = deployment, index
        self._directory = self._environments = ""

    def look(self) -> None:
        """Ask for the environment that is there."""
        uid = self.node.uid()
        self._environments = directories.environments(uid)
        run = directories.run_directory(uid, self._deployment, self._index)
        # Its own: what `stop` ends in the run directory is the deployment.
        self._directory = f"{run}/environment"
        source = resources.files("mtppp.runtime").joinpath(_MAKER).read_bytes()
        self.node.write(self._environments, [])
        self.node.write(
            self._directory, [File(_MAKER, source), File(_LOCK, self._lock.text.encode())]
        )
        argv = self._argv("look")
        ended = self.node.run(argv, env={}, directory=self._directory, timeout=_LOOK_TIMEOUT)
        try:
            found = json.loads(ended.stdout.rpartition("\n")[0].rpartition("\n")[2])
        except ValueError:
            raise RemoteCommandFailed(
                self.node.host,
                f"{self.base} could not look at {self.path}",
                details=(ended.stderr or ended.stdout).splitlines()[-5:],
            ) from None
        self.python, self.held = found["python"], found["environment"]

    @property
    def path(self) -> str:
        return f"{self._environments}/{self._lock.digest}"

    def start(self) -> None:
        """Begin to make one."""
        self.runs = True
        more = [f"{self._directory}/{_LOCK}", str(self._lock.bytes)]
        self.node.start(
            role=_ROLE,
            argv=self._argv("make", *more, *([self._wheelhouse] if self._wheelhouse else [])),
            env={**self._env, "MTPPP_RUN_DIR": self._directory},
            directory=self._directory,
            log=_LOG,
        )

    def watch(self) -> None:
        """See whether it still runs, and what it says."""
        recorded = self.node.processes(self._directory)["recorded"]
        self.runs = any(entry["alive"] for entry in recorded)
        lines = [line.strip() for line in self._log().splitlines() if line.strip()]
        # pip names all that it installs in one line.
        self.said = lines[-1][:80] if lines else self.said

    def stop(self) -> None:
        """End it; what it made so far is no environment, and the next one clears it away."""
        self.node.stop(self._directory, grace={}, segments_file="none")

    def require(self) -> None:
        """Look again, now that it has ended.

        Raises:
            RemoteCommandFailed: there is no environment; says why.
        """
        self.look()
        if self.held is None:
            raise why_not(self.node.host, self._log(), self._lock, self._wheelhouse)

    def use(self) -> None:
        """From here on the environment's Python answers for the node."""
        self.node.python = f"{self.path}/bin/python"

    def _log(self) -> str:
        return "".join(self.node.read(f"{self._directory}/{_LOG}", limit=1 << 16).values())

    def _argv(self, action: str, *more: str) -> list[str]:
        script = f"{self._directory}/{_MAKER}"
        return [self.base, "-I", script, action, self._environments, self._lock.digest, *more]


def why_not(host: str, log: str, lock: Lock, wheelhouse: str | None) -> RemoteCommandFailed:
    """Why a maker ended without an environment, from its log."""
    try:
        ended = json.loads(log.strip().rpartition("\n")[2])
        what, message = ended["what"], ended["message"]
    except (ValueError, KeyError, TypeError):
        what, message = "death", "the process that makes it was ended"
    hint = _HINTS.get(what, "")
    details: Sequence[str] = ()
    if what == "pip":
        message, hint = _pip_failure(log, lock, wheelhouse)
        details = telling_lines(log.strip().rpartition("\n")[0], 6)
    return RemoteCommandFailed(
        host, f"no environment could be made: {message}", hint=hint, details=details
    )


_HINTS = {
    "space": "free some space there, or have /var/tmp on a larger disk",
    "venv": "install python's venv module there (Debian, Ubuntu: apt install python3-venv)",
    "wheelhouse": "runtime.wheelhouse is a directory that every node has",
    "death": "launch again; what it left is cleared away then",
}


def _pip_failure(log: str, lock: Lock, wheelhouse: str | None) -> tuple[str, str]:
    """(message, hint)"""
    if "No space left on device" in log:
        return "the disk is full", _HINTS["space"]
    if "DO NOT MATCH THE HASHES" in log:
        wheel = _first(log, r"^ +(\S+==\S+)") or "a wheel"
        return (
            f"{wheel} is another file than the lock was made from",
            "do not use it: somebody changed the wheel, or built it anew; a lock of your own goes "
            "into runtime.lock",
        )
    missing = _first(log, r"No matching distribution found for (\S+)") or "a distribution"
    if wheelhouse:
        return (
            f"{wheelhouse} has no {missing} for this Python",
            f"fill it: pip download --no-deps --require-hashes -r {lock.origin} -d DIRECTORY",
        )
    if re.search(r"connection broken|Failed to establish|Could not connect|ConnectionError", log):
        return (
            f"no index of packages could be reached to get {missing} from",
            "configure pip on the node (pip.conf, or HTTPS_PROXY there), or fill a directory and "
            "name it in runtime.wheelhouse",
        )
    return (
        f"no index that pip there knows has {missing} for this Python",
        "configure a further index in the node's pip.conf, or use runtime.wheelhouse",
    )


def _first(log: str, pattern: str) -> str:
    found = re.search(pattern, log, re.MULTILINE)
    return found[1] if found else ""
