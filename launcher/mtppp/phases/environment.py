"""See to the environment that vLLM runs in, where the file asks mtppp to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from mtppp.console import Step
from mtppp.errors import MtpppError, RemoteCommandFailed
from mtppp.hosts.node import File, Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.logs import telling_lines
from mtppp.phases.phase import WithoutTrace, on_each
from mtppp.plan import directories
from mtppp.runtime.lock import Lock
from mtppp.runtime.runtime import runtime_of

_POLL = 1.0  # seconds between two looks at a maker
_LOOK_TIMEOUT = 60.0
_MAKER = "maker.py"
_LOCK = "lock.txt"
_LOG = "environment.log"
_ROLE = "environment"


class MakeEnvironment(WithoutTrace):
    """A managed environment on every node, the same on all; one that is there is used.

    It stays when a later step fails: its name says what is in it.
    """

    title = "environment"

    def run(self, deployment: Deployment, step: Step) -> None:
        lock = runtime_of(deployment.cluster).lock
        if lock is None:
            step.note = f"{deployment.cluster.runtime.python}, as it is there"
            return
        makers = [
            _Maker(deployment, index, lock, node) for index, node in enumerate(deployment.nodes)
        ]
        on_each(makers, lambda maker: maker.look())
        _require_pythons(makers, lock)
        missing = [maker for maker in makers if maker.held is None]
        if missing:
            _make(missing, step)
        _require_equal(makers)
        for maker in makers:
            maker.use()
        made = f", made on {', '.join(m.node.host for m in missing)}" if missing else ""
        step.note = f"{lock.digest}, {len(lock.versions)} distributions{made}"


def use_environment(deployment: Deployment) -> list[str]:
    """Look through managed environments where they are, and make none.

    Returns:
        hosts that have none yet; there the base Python goes on answering.
    """
    runtime = runtime_of(deployment.cluster)
    without: list[str] = []
    if runtime.lock is None:
        return without

    def use(node: Node) -> None:
        python = runtime.python(node.uid())
        if node.exists(python):
            node.python = python
        else:
            without.append(node.host)

    on_each(deployment.nodes, use)
    return [node.host for node in deployment.nodes if node.host in without]


class _Maker:
    """The maker on one node.

    Attributes:
        held: what is in the environment; None while there is none.
        python: version of the Python that would make one.
    """

    def __init__(self, deployment: Deployment, index: int, lock: Lock, node: Node) -> None:
        self.node = node
        self.held: Mapping[str, Any] | None = None
        self.python = ""
        self._lock = lock
        self.base = node.python
        self._wheelhouse = deployment.cluster.runtime.wheelhouse
        self._env = dict(deployment.cluster.runtime.env)
        self._name, self._index = deployment.cluster.name, index
        self._directory = self._environments = ""

    def look(self) -> None:
        """Ask for the environment that is there."""
        uid = self.node.uid()
        self._environments = directories.environments(uid)
        run = directories.run_directory(uid, self._name, self._index)
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
        more = [f"{self._directory}/{_LOCK}", str(self._lock.bytes)]
        self.node.start(
            role=_ROLE,
            argv=self._argv("make", *more, *([self._wheelhouse] if self._wheelhouse else [])),
            env={**self._env, "MTPPP_RUN_DIR": self._directory},
            directory=self._directory,
            log=_LOG,
        )

    def runs(self) -> bool:
        recorded = self.node.processes(self._directory)["recorded"]
        return any(entry["alive"] for entry in recorded)

    def log(self) -> str:
        return "".join(self.node.read(f"{self._directory}/{_LOG}", limit=1 << 16).values())

    def stop(self) -> None:
        self.node.stop(self._directory, grace={}, segments_file="none")

    def require(self) -> None:
        """Look again, now that it has ended.

        Raises:
            RemoteCommandFailed: there is no environment; says why.
        """
        self.look()
        if self.held is None:
            raise why_not(self.node.host, self.log(), self._lock, self._wheelhouse)

    def use(self) -> None:
        """From here on the environment's Python answers for the node."""
        self.node.python = f"{self.path}/bin/python"

    def _argv(self, action: str, *more: str) -> list[str]:
        script = f"{self._directory}/{_MAKER}"
        return [self.base, "-I", script, action, self._environments, self._lock.digest, *more]


def _make(makers: Sequence[_Maker], step: Step) -> None:
    """Make them on all nodes at once; when one fails or a person interrupts, all are ended."""
    try:
        on_each(makers, lambda maker: maker.start())
        waiting = list(makers)
        while waiting:
            waiting = [maker for maker in waiting if maker.runs()]
            if waiting:
                step.progress(f"{waiting[0].node.host}: {_progress(waiting[0].log())}")
                time.sleep(_POLL)
        on_each(makers, lambda maker: maker.require())
    except BaseException:
        on_each(makers, lambda maker: maker.stop())
        raise


def _progress(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # pip names the packages that it installs in one line as long as the lock.
    return lines[-1][:80] if lines else "starts"


def _require_pythons(makers: Sequence[_Maker], lock: Lock) -> None:
    """Raises MtpppError where an environment has to be made and cannot be, or not alike."""
    unfit = [
        f"{maker.node.host}: {maker.base} is Python {maker.python}"
        for maker in makers
        if maker.held is None and _minor(maker.python) not in lock.pythons
    ]
    if unfit:
        raise MtpppError(
            f"{unfit[0]}; the lock has wheels for {', '.join(lock.pythons)}",
            details=unfit[1:],
            hint="name such a Python in runtime.python, or lock another in runtime.lock",
        )


def _require_equal(makers: Sequence[_Maker]) -> None:
    """Raises MtpppError where an environment was changed by hand, or two are not the same."""
    for maker in makers:
        assert maker.held is not None
        if changed := maker.held["changed"]:
            raise RemoteCommandFailed(
                maker.node.host,
                f"{maker.path} was changed since it was made: {', '.join(changed[:5])}",
                hint=f"remove it there: rm -r {maker.path} {maker.path}.*; a launch makes it anew",
            )
    first = makers[0]
    for maker in makers[1:]:
        for what in ("distributions", "python"):
            ours, theirs = _comparable(first, what), _comparable(maker, what)
            if ours != theirs:
                raise MtpppError(
                    f"the environments of {first.node.host} and {maker.node.host} differ in "
                    + ", ".join(sorted(set(ours) ^ set(theirs))[:6]),
                    hint=f"remove {first.path} and {first.path}.* on one of them; give both the "
                    "same Python in runtime.python",
                )


def _comparable(maker: _Maker, what: str) -> Sequence[str]:
    assert maker.held is not None
    if what == "python":
        return [f"Python {_minor(maker.held['python'])}"]
    return [f"{name} {version}" for name, version in maker.held["distributions"].items()]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


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
