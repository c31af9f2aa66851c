"""What NCCL is told of the ports between the hosts, and what is in the way of RDMA there."""

from __future__ import annotations

from collections.abc import Sequence

from mtppp.cluster import Cluster
from mtppp.hosts.facts import HostFacts
from mtppp.plan.settings import Setting, Withheld

NAME = "NCCL_IB_HCA"
MINIMUM_FILES = 65536
_WHERE = "set it in /etc/security/limits.conf, or in sshd's unit"


def infiniband(cluster: Cluster, facts: Sequence[HostFacts]) -> Setting | Withheld | None:
    """NCCL_IB_HCA: the ports that NCCL is to use, where it would take others as well."""
    if len(cluster.nodes) == 1:
        return None
    if any(host.rdma is None for host in facts):
        return Withheld(
            NAME,
            "NCCL takes every active RDMA port, those for storage and Ethernet too; which the "
            "hosts have was not asked",
            "the hosts' RDMA ports: plan with --connect",
        )
    wanted = [_near_infiniband(host) for host in facts]
    active = [[port.name for port in host.rdma or () if port.active] for host in facts]
    return _choose(cluster, wanted, active) if any(active) else None


def _choose(
    cluster: Cluster, wanted: Sequence[Sequence[str]], active: Sequence[Sequence[str]]
) -> Setting | Withheld:
    if not all(wanted):
        return Withheld(
            NAME,
            f"{_first_without(cluster, wanted)} has no active InfiniBand port below the PCIe root "
            "port of a GPU (RoCE, or a virtual machine?); set it in runtime.env where you know",
        )
    if any(names != wanted[0] for names in wanted):
        held = "; ".join(
            f"{node.host} {', '.join(names)}"
            for node, names in zip(cluster.nodes, wanted, strict=True)
        )
        return Withheld(
            NAME, f"NCCL pairs ports by their place in the list, and they differ: {held}"
        )
    others = sorted({port for names in active for port in names} - set(wanted[0]))
    if not others:
        return Withheld(
            NAME, "every active RDMA port is InfiniBand and near a GPU: NCCL finds them"
        )
    return Setting(
        NAME,
        f"={','.join(wanted[0])}",
        "exactly the active InfiniBand ports below the PCIe root port of a GPU, the same on all "
        f"nodes; NCCL would take {', '.join(others)} as well",
    )


def _near_infiniband(host: HostFacts) -> list[str]:
    """Names of the ports for NCCL, in the order of the GPUs that they are near."""
    ports = [
        port
        for port in host.rdma or ()
        if port.active and port.link_layer == "InfiniBand" and port.near
    ]
    return [port.name for port in sorted(ports, key=lambda port: (port.near, port.name))]


def _first_without(cluster: Cluster, wanted: Sequence[Sequence[str]]) -> str:
    return next(n.host for n, names in zip(cluster.nodes, wanted, strict=True) if not names)


def fabric_warnings(cluster: Cluster, facts: Sequence[HostFacts]) -> list[str]:
    """What is in the way of RDMA between several hosts; nothing where they were not asked."""
    if len(cluster.nodes) == 1:
        return []
    warnings = []
    for node, host in zip(cluster.nodes, facts, strict=True):
        if host.rdma is None:
            continue
        if not any(port.active for port in host.rdma):
            warnings.append(
                f"{node.host}: no RDMA port is active; NCCL will talk over TCP on {host.interface}"
            )
            continue
        locked, files = host.limits.get("memlock"), host.limits.get("nofile")
        if locked is not None:
            warnings.append(
                f"{node.host}: a process may lock {locked / 2**30:.2f} GiB of memory, and RDMA "
                f"needs memlock unlimited: {_WHERE}"
            )
        if files is not None and files < MINIMUM_FILES:
            warnings.append(
                f"{node.host}: a process may open {files} files; below {MINIMUM_FILES} NCCL and "
                f"Ray may run out of them (nofile): {_WHERE}"
            )
    return warnings
