"""Where a node's vLLM is: in a Python that is there, or in an environment that mtppp makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mtppp.cluster import Cluster
from mtppp.errors import ConfigurationError
from mtppp.plan import directories
from mtppp.runtime.lock import Lock, bundled_lock, read_lock


class Runtime(Protocol):
    """How vLLM is had on a node."""

    @property
    def lock(self) -> Lock | None:
        """What mtppp has to see to; None where it only uses what is there."""

    def python(self, uid: int | str) -> str:
        """The Python that has vLLM, for the user of this number."""


@dataclass(frozen=True, slots=True)
class ExistingPython:
    """Somebody installed vLLM; mtppp checks the versions and changes nothing."""

    path: str

    @property
    def lock(self) -> None:
        return None

    def python(self, uid: int | str) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class ManagedEnvironment:
    """An environment of mtppp's own, named by its lock: the same on all nodes, never changed."""

    lock: Lock

    def python(self, uid: int | str) -> str:
        return f"{directories.environment(uid, self.lock.digest)}/bin/python"


def runtime_of(cluster: Cluster) -> ExistingPython | ManagedEnvironment:
    """What the file asks for.

    Raises:
        ConfigurationError: there is no lock for it, or the lock is for another release.
    """
    runtime = cluster.runtime
    if runtime.environment is None:
        return ExistingPython(runtime.python)
    if runtime.lock is None:
        return ManagedEnvironment(bundled_lock(runtime.vllm, runtime.device))
    lock = read_lock(runtime.lock)
    if lock.vllm != runtime.vllm:
        held = f"vLLM {lock.vllm}" if lock.vllm else "no vLLM"
        raise ConfigurationError(
            f"{lock.origin}: has {held}; runtime.vllm asks for {runtime.vllm}",
            hint="change one of the two",
        )
    return ManagedEnvironment(lock)
