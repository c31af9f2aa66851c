"""Bringing a lab up, or up to what is asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from .console import LabError, say
from .files import write_files
from .kernel import (
    cables_up,
    known_host_names,
    lose_nothing,
    members,
    operator_subnet,
    routed_subnets,
    set_cable,
)
from .names import PRIVATE, SWITCH, Lab, Subnet, host_at
from .removal import end, lock, remove, remove_directory
from .start import START_SECONDS, start_hosts, start_switch, wait_for_sshd

CHECKOUT = Path(__file__).resolve().parents[2]

DEBIAN_PACKAGES = {
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}


def checked_shares(paths: Sequence[Path]) -> list[str]:
    shares = []
    for path in (CHECKOUT, *paths):
        share = path.resolve()
        if not share.is_dir():
            raise LabError(f"cannot share {path}: there is no such directory")
        if str(share) in PRIVATE:
            raise LabError(f"cannot share {share}: every host has its own", "share a part of it")
        shares.append(str(share))
    return shares


def free_subnet(wanted: Subnet | None) -> Subnet:
    """The subnet asked for, or the first of ours that this machine does not use."""
    routed = routed_subnets()
    if wanted:
        # A wider route may contain it: ours goes first, being more specific.
        if any(wanted.overlaps(other) and other.prefixlen >= wanted.prefixlen for other in routed):
            raise LabError(f"--subnet {wanted} is in use", "`ip route` tells by what; leave it out")
        return wanted
    for third in range(256):
        candidate = Subnet(f"10.77.{third}.0/24")
        if not any(candidate.overlaps(other) for other in routed):
            return candidate
    raise LabError("no free subnet among 10.77.0.0/24 ... 10.77.255.0/24", "name one: --subnet")


def require_tools() -> None:
    missing = [tool for tool in DEBIAN_PACKAGES if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({DEBIAN_PACKAGES[tool] for tool in missing}))
        raise LabError(f"missing: {', '.join(missing)}", f"apt-get install {packages}")


def up(lab: Lab, count: int, wanted: Subnet | None, shares: Sequence[Path]) -> None:
    require_tools()
    visible = checked_shares(shares)
    with lock() as descriptor:
        running = members(lab)
        subnet = operator_subnet(lab)
        if SWITCH not in running or subnet is None:
            if removed := remove(lab):
                say(f"removed the remains of an earlier lab: {', '.join(removed)}")
            running, subnet = {}, None
        if subnet is not None and wanted not in (None, subnet):
            raise LabError(
                f"lab {lab.name} is at {subnet}",
                f"scripts/lab down --name {lab.name}, or another --name",
            )
        before = set(running)
        try:
            bring_up(
                lab,
                subnet or free_subnet(wanted),
                count,
                running=running,
                shares=visible,
                lock_descriptor=descriptor,
            )
        except BaseException:
            if SWITCH not in before:
                remove(lab)
            for member in set(members(lab)) - before:
                end(lab, member)
            raise


def bring_up(
    lab: Lab,
    subnet: Subnet,
    count: int,
    *,
    running: dict[str, int],
    shares: Sequence[str],
    lock_descriptor: int,
) -> None:
    deadline = time.monotonic() + START_SECONDS
    hosts = [host_at(subnet, index) for index in range(1, count + 1)]
    names = {host.name for host in hosts}
    for name in known_host_names(lab, running):
        if name not in names:
            end(lab, name)
            remove_directory(lab.member_directory(name))
            say(f"{name}: removed")
    write_files(lab, subnet, hosts)
    switch = running.get(SWITCH) or start_switch(lab, subnet, lock_descriptor, deadline)
    for name, passes in cables_up(switch).items():
        if name in running and not passes:
            set_cable(switch, name, passes=True)
            say(f"{name}: healed")
    lose_nothing(None, lab.link)
    for name in names & set(running):
        lose_nothing(running[name], "eth0")
    new = [host for host in hosts if host.name not in running]
    start_hosts(
        lab,
        subnet,
        new,
        switch=switch,
        shares=shares,
        lock_descriptor=lock_descriptor,
        deadline=deadline,
    )
    for host in hosts:
        wait_for_sshd(lab, host, deadline)
        say(f"{host.name}: {'started' if host in new else 'up'} at {host.address}")
    say(f"ssh -F {lab.ssh_config} {hosts[0].name}")
