"""What is known of a host before anything on it is planned or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtppp.gpus import GPU_TYPES

UNKNOWN_UID = "<uid>"
"""The user's number on a host that nobody asked."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU: memory in bytes, compute capability such as "9.0"."""

    name: str
    memory: int
    compute_capability: str

    @classmethod
    def of_type(cls, name: str) -> GpuFacts:
        """A GPU of one of GPU_TYPES, as its driver would show it."""
        kind = GPU_TYPES[name]
        return cls(name, kind.memory, kind.compute_capability)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of InfiniBand or RoCE.

    Attributes:
        link_layer: "InfiniBand" or "Ethernet".
        near: indices of the GPUs below the same PCIe root port.
    """

    device: str
    port: int
    active: bool
    link_layer: str
    near: tuple[int, ...]

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA has it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A deployment of which something runs on a host, or is being launched there.

    Attributes:
        directory: its run directory.
        device: cuda or cpu; None where its Plan is not to be had.
        by, since: who launched it, and when; "" where that is not known.
    """

    directory: str
    device: str | None
    by: str
    since: str

    @property
    def name(self) -> str:
        """Of the deployment."""
        return self.directory.split("/")[-2]

    @property
    def node(self) -> str:
        """Its place in the deployment's file."""
        return self.directory.split("/")[-1]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host as its own python saw it.

    Attributes:
        hostname, user, uid: who we are there; where nobody was asked, what stands for it.
        path: PATH of a login there.
        python: absolute path of the interpreter that answered.
        python_version: such as "3.11.7".
        versions: of the distributions vllm, ray and torch; None where not installed.
        interface: the network interface that holds the node's cluster address; None if none does.
        addresses: (interface, address) pairs of the host.
        gpus: the GPUs the driver shows.
        rdma: ports of InfiniBand and RoCE; None where nobody asked.
        limits: what a process may have of "nofile" and "memlock" (bytes); None: no limit. Empty
            where nobody asked.
        deployments: what of mtppp's runs there already, or is being launched.
        ports_taken: those of the asked ports that something holds, and what that is.
        ports_forbidden: those of the asked ports that the user may not listen on.
        shm_bytes: size of /dev/shm.
        model_path: absolute path of the model there; None for a model that is not a path.
        model_config: text of the model's config.json there, or in its cache of the hub; None if
            there is none.
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
    deployments: tuple[Neighbour, ...]
    ports_taken: tuple[tuple[int, str], ...]
    ports_forbidden: tuple[int, ...]
    shm_bytes: int
    model_path: str | None
    model_config: str | None
    rdma: tuple[RdmaPort, ...] | None = None
    limits: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> HostFacts:
        """From the agent's answer to `facts`."""
        return cls(
            **{
                **answer,
                "addresses": tuple((name, address) for name, address in answer["addresses"]),
                "gpus": tuple(GpuFacts(**gpu) for gpu in answer["gpus"]),
                "rdma": tuple(
                    RdmaPort(**{**port, "near": tuple(port["near"])}) for port in answer["rdma"]
                ),
                "deployments": tuple(Neighbour(**found) for found in answer["deployments"]),
                "ports_taken": tuple((port, by) for port, by in answer["ports_taken"]),
                "ports_forbidden": tuple(answer["ports_forbidden"]),
            }
        )

    @classmethod
    def assumed(
        cls, address: str, *, python: str, vllm: str, gpus: Sequence[GpuFacts] = ()
    ) -> HostFacts:
        """A host that nobody asked, for a Plan made without one.

        What only the host could tell is a placeholder in angle brackets, which no shell and no
        program would take for a value.
        """
        return cls(
            hostname=f"<hostname of {address}>",
            user="<user>",
            uid=UNKNOWN_UID,
            path="<PATH>",
            python=python,
            python_version="<version>",
            versions={"vllm": vllm, "ray": None, "torch": None},
            interface=f"<interface of {address}>",
            addresses=(),
            gpus=tuple(gpus),
            deployments=(),
            ports_taken=(),
            ports_forbidden=(),
            shm_bytes=0,
            model_path=None,
            model_config=None,
        )

    @property
    def vllm_release(self) -> str | None:
        """vLLM's release without a local part: "0.32.0" for "0.32.0+cpu"."""
        version = self.versions["vllm"]
        return None if version is None else version.partition("+")[0]
