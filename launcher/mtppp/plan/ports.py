"""The ports Ray is pinned to: a firewall can know them, and two nodes can share a machine."""

from __future__ import annotations

from mtppp.cluster.schema import PORTS_PER_NODE
from mtppp.plan.plan import RayPorts


def ray_ports(base: int) -> RayPorts:
    """The block of ports `base` .. `base + 99`; the last 80 are for Ray's workers."""
    return RayPorts(
        gcs=base,
        node_manager=base + 1,
        object_manager=base + 2,
        runtime_env_agent=base + 3,
        dashboard_agent_http=base + 4,
        dashboard_agent_grpc=base + 5,
        metrics_export=base + 6,
        dashboard=base + 7,
        client_server=base + 8,
        first_worker=base + 20,
        last_worker=base + PORTS_PER_NODE - 1,
    )


def base_of(node: int, *, first: int, local: bool) -> int:
    """First port of a node's block.

    Hosts of their own all use the same block: one firewall rule. Local nodes share the machine's
    ports, so each has a block of its own.
    """
    return first + PORTS_PER_NODE * node if local else first


def listened(ports: RayPorts, *, head: bool) -> tuple[int, ...]:
    """The ports of a node that must be free before a launch, without the workers' range.

    The dashboard's is not among them: mtppp starts none.
    """
    always = (
        ports.node_manager,
        ports.object_manager,
        ports.runtime_env_agent,
        ports.dashboard_agent_http,
        ports.dashboard_agent_grpc,
        ports.metrics_export,
    )
    return (ports.gcs, *always, ports.client_server) if head else always
