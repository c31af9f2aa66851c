"""Ports and directories: nothing may share what it must not share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields

import pytest

from mtppp.cluster import Cluster
from mtppp.cluster.schema import PORTS_PER_NODE
from mtppp.plan import directories
from mtppp.plan.build import node_ports
from mtppp.plan.plan import RayPorts
from mtppp.plan.ports import base_of, listened, ray_ports

LARGEST_UID = 2**32 - 2


def test_ports_lie_in_their_block_and_differ() -> None:
    ports = asdict(ray_ports(26300))
    assert sorted(ports.values()) == [*range(26300, 26309), 26320, 26399]
    assert len(ports) == len(fields(RayPorts))
    assert max(ports.values()) == 26300 + PORTS_PER_NODE - 1


def test_hosts_of_their_own_use_the_same_block_and_local_nodes_one_each() -> None:
    assert [base_of(node, first=26300, local=False) for node in range(3)] == [26300] * 3
    assert [base_of(node, first=26300, local=True) for node in range(3)] == [26300, 26400, 26500]


def test_the_nodes_of_a_file(make_cluster: Callable[..., Cluster]) -> None:
    local = [
        {"host": name, "address": f"127.0.1.{i}", "transport": "local", "gpus": 1}
        for i, name in enumerate("ab", 1)
    ]
    there = make_cluster(ray={"base_port": 27000})
    here = make_cluster(nodes=local)
    assert [ports.gcs for ports in node_ports(there)] == [27000, 27000]
    assert [ports.gcs for ports in node_ports(here)] == [26300, 26400]


def test_what_a_node_listens_on() -> None:
    ports = ray_ports(26300)
    assert listened(ports, head=False) == tuple(range(26301, 26307))
    # The client server's port is opened by `ray start --head` though nobody uses it.
    assert listened(ports, head=True) == (26300, *range(26301, 26307), 26308)


def test_directories() -> None:
    assert directories.run_directory(1000, "glm-5.2", 1) == "/var/tmp/mtppp-1000/glm-5.2/1"
    assert directories.plugins_directory(1000, "00ff") == "/var/tmp/mtppp-1000/plugins/00ff"
    assert directories.ray_directory(1000, "glm-5.2", 1) == "/var/tmp/mtppp-1000/r/6a0c6ebd"


@pytest.mark.parametrize("name", ["a", "a" * 40])
def test_a_socket_below_rays_directory_has_a_path_the_kernel_takes(name: str) -> None:
    directory = directories.ray_directory(LARGEST_UID, name, 99)
    assert len(directory) <= 43
    socket = "/session_2026-11-29_14-52-29_123456_4194304/sockets/plasma_store"
    assert len(directory + socket) <= 107


def test_two_nodes_on_one_machine_share_no_directory() -> None:
    made = {
        of(0, name, node)
        for of in (directories.run_directory, directories.ray_directory)
        for name in ("a", "b")
        for node in (0, 1)
    }
    assert len(made) == 8
