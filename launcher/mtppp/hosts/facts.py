"""What is known of a host before anything on it is planned or changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtppp.gpus import GPU_TYPES


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU: memory in bytes, compute capability such as "9.0"."""

    name: str
    memory: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host as its own python saw it.

    Attributes:
        hostname, user, uid: who we are there; `uid` is text in facts that were assumed.
        path: PATH of a login there.
        python: absolute path of the interpreter that answered.
        python_version: such as "3.11.7".
        versions: of the distributions vllm, ray and torch; None where not installed.
        interface: the network interface that holds the node's cluster address; None if none does.
        addresses: (interface, address) pairs of the host.
        gpus: the GPUs the driver shows.
        ports_taken: those of the asked ports that something else holds.
        shm_bytes: size of /dev/shm.
        model_config: text of the model's config.json there; None if there is none.
    """

    hostname: str
    user: str
    uid: int | str
    path: str
    python: str
    python_version: str
    versions: Mapping[str, str | None]
    interface: str | None
    addresses: tuple[tuple[str, str], ...]
    gpus: tuple[GpuFacts, ...]
    ports_taken: tuple[int, ...]
    shm_bytes: int
    model_config: str | None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> HostFacts:
        """From the agent's answer to `facts`."""
        return cls(
            **{
                **answer,
                "addresses": tuple((name, address) for name, address in answer["addresses"]),
                "gpus": tuple(GpuFacts(**gpu) for gpu in answer["gpus"]),
                "ports_taken": tuple(answer["ports_taken"]),
            }
        )

    @classmethod
    def assumed(
        cls, *, host: str, address: str, python: str, vllm: str, gpus: int, gpu: str | None
    ) -> HostFacts:
        """Facts of a host that nobody asked: what only the host knows is `<text in brackets>`.

        Args:
            vllm: the release that the host must have.
            gpus: how many it must have.
            gpu: their type, one of GPU_TYPES; None: no GPU is known, and `gpus` stays empty.
        """
        kind = GPU_TYPES[gpu] if gpu else None
        return cls(
            hostname=host,
            user=f"<user on {host}>",
            uid="<uid>",
            path=f"<PATH of {host}>",
            python=f"<home>{python[1:]}" if python.startswith("~/") else python,
            python_version="",
            versions={"vllm": vllm, "ray": None, "torch": None},
            interface=f"<interface of {address}>",
            addresses=(),
            gpus=(GpuFacts(gpu, kind.memory, kind.compute_capability),) * gpus
            if gpu and kind
            else (),
            ports_taken=(),
            shm_bytes=0,
            model_config=None,
        )

    @property
    def vllm_release(self) -> str | None:
        """vLLM's release without a local part: "0.32.0" for "0.32.0+cpu"."""
        version = self.versions["vllm"]
        return None if version is None else version.partition("+")[0]
