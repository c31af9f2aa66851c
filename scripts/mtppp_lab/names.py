"""A lab's names, addresses and paths."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

STATE = Path("/var/lib/mtppp-lab")
LINK = "mtlab-"
MARK = "MTPPP_LAB"
SWITCH = "switch"
BRIDGE = "bridge"
OPERATOR = "operator"
OPERATOR_INDEX = 254
MAX_HOSTS = 250

# What a host has to itself on disk, and where that is kept in the host's directory.
PRIVATE = {"/tmp": "tmp", "/var/tmp": "var-tmp", "/var/log": "log", "/run": "run"}
CLEARED_AT_BOOT = ("tmp", "run")

Subnet = ipaddress.IPv4Network


@dataclass(frozen=True)
class Lab:
    """Names and paths that follow from a lab's name."""

    name: str

    @property
    def directory(self) -> Path:
        return STATE / self.name

    @property
    def link(self) -> str:
        """The operator's end of its cable to the switch; at most 15 characters."""
        return f"{LINK}{self.name}"

    @property
    def identity(self) -> Path:
        return self.directory / "id_ed25519"

    @property
    def ssh_config(self) -> Path:
        return self.directory / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    def member_directory(self, member: str) -> Path:
        return self.directory / member

    def host_key(self, host: str) -> Path:
        return self.member_directory(host) / "host_key"


@dataclass(frozen=True)
class Host:
    name: str
    address: ipaddress.IPv4Address

    @property
    def mac(self) -> str:
        """Follows from the address, so that neighbours' ARP entries outlive a restart."""
        return "02:00:" + ":".join(f"{byte:02x}" for byte in self.address.packed)


def host_at(subnet: Subnet, index: int) -> Host:
    return Host(f"n{index}", subnet[index])
