"""See to the environment that vLLM runs in, where the file asks mtppp to."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mtppp.console import Step
from mtppp.errors import MtpppError, RemoteCommandFailed
from mtppp.hosts.node import Node
from mtppp.phases.deployment import Deployment
from mtppp.phases.environment_maker import EnvironmentMaker
from mtppp.phases.phase import look_at_each, on_each
from mtppp.runtime.lock import Lock
from mtppp.runtime.runtime import runtime_of

_POLL = 1.0  # seconds between two looks at a maker


class MakeEnvironment:
    """A managed environment on every node, the same on all; one that is there is used."""

    title = "environment"

    def run(self, deployment: Deployment, step: Step) -> None:
        lock = runtime_of(deployment.cluster).lock
        if lock is None:
            step.note = f"{deployment.cluster.runtime.python}, as it is there"
            return
        cluster = deployment.cluster
        deployment.makers = [
            EnvironmentMaker(
                node,
                deployment=cluster.name,
                index=index,
                lock=lock,
                wheelhouse=cluster.runtime.wheelhouse,
                env=cluster.runtime.env,
            )
            for index, node in enumerate(deployment.nodes)
        ]
        makers = deployment.makers
        look_at_each(makers, lambda maker: maker.look())
        _require_pythons(makers, lock)
        missing = [maker for maker in makers if maker.held is None]
        _make(missing, step)
        _require_equal(makers)
        for maker in makers:
            maker.use()
        made = f", made on {', '.join(m.node.host for m in missing)}" if missing else ""
        step.note = f"{lock.digest}, {len(lock.versions)} distributions{made}"

    def clean_up(self, deployment: Deployment) -> None:
        """Makers are ended; an environment that is whole stays: its name says what is in it."""
        on_each([m for m in deployment.makers if m.runs], lambda maker: maker.stop())


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

    look_at_each(deployment.nodes, use)
    return [node.host for node in deployment.nodes if node.host in without]


def _make(makers: Sequence[EnvironmentMaker], step: Step) -> None:
    """Make them on all nodes at once."""
    on_each(makers, lambda maker: maker.start())
    while waiting := [maker for maker in makers if maker.runs]:
        step.progress(f"{waiting[0].node.host}: {waiting[0].said}")
        time.sleep(_POLL)
        look_at_each(waiting, lambda maker: maker.watch())
        look_at_each([m for m in waiting if not m.runs], lambda maker: maker.require())


def _require_pythons(makers: Sequence[EnvironmentMaker], lock: Lock) -> None:
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


def _require_equal(makers: Sequence[EnvironmentMaker]) -> None:
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


def _comparable(maker: EnvironmentMaker, what: str) -> Sequence[str]:
    assert maker.held is not None
    if what == "python":
        return [f"Python {_minor(maker.held['python'])}"]
    return [f"{name} {version}" for name, version in maker.held["distributions"].items()]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
