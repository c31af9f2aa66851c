"""Take the deployment's lock on every node, so that nobody else works on it meanwhile."""

from __future__ import annotations

from mtppp.console import Step
from mtppp.hosts.lock import GPUS, Holder
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each


class TakeLocks(WithoutTrace):
    """The first node's first: of two who begin at once, one gets no lock at all.

    A launch also claims the hosts' GPUs, against launches of other deployments. `run_phases` gives
    all back.
    """

    title = "lock"

    def __init__(self, what: str) -> None:
        self._what = what

    def run(self, deployment: Deployment, step: Step) -> None:
        holder = Holder.here(self._what, deployment.cluster.name)
        takes_gpus = self._what == "launch" and deployment.cluster.runtime.device == "cuda"
        claim = GPUS if takes_gpus else None

        def lock(index: int) -> None:
            deployment.nodes[index].lock(index, holder, claim=claim)

        first, *others = deployment.reached
        on_each([first], lock)
        on_each(others, lock)
        step.note = "nobody else is at work on it"
