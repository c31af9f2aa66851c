"""The commands on a lab that is up, and `down`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from typing import NoReturn

from .console import LabError, say
from .kernel import (
    cables_up,
    known_host_names,
    lose,
    members,
    operator_subnet,
    set_cable,
)
from .names import OPERATOR, OPERATOR_INDEX, PRIVATE, SWITCH, Lab, host_at
from .removal import end, remove


def down(lab: Lab) -> None:
    removed = remove(lab)
    say(f"{lab.name}: removed {', '.join(removed)}" if removed else f"{lab.name}: not there")


def status(lab: Lab, as_json: bool) -> int:
    running = members(lab)
    subnet = operator_subnet(lab)
    if SWITCH not in running or subnet is None:
        raise LabError(f"lab {lab.name} is not up", f"scripts/lab up 2 --name {lab.name}")
    cables = cables_up(running[SWITCH])
    hosts = []
    for name in known_host_names(lab, running):
        alive = name in running and name in cables
        hosts.append(
            {
                "name": name,
                "address": str(host_at(subnet, int(name[1:])).address),
                "state": "down" if not alive else "up" if cables[name] else "cut",
                "pid": running.get(name),
                "log": str(lab.member_directory(name) / PRIVATE["/var/log"]),
            }
        )
    report = {
        "name": lab.name,
        "subnet": str(subnet),
        "operator": str(subnet[OPERATOR_INDEX]),
        "directory": str(lab.directory),
        "ssh_config": str(lab.ssh_config),
        "hosts": hosts,
    }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for host in hosts:
            print(f"{host['name']:5} {host['state']:5} {host['address']}")
    return 0 if all(host["state"] == "up" for host in hosts) else 1


def running_host(lab: Lab, host: str) -> tuple[int, int]:
    """Pid of the switch and of the host's init."""
    running = members(lab)
    if SWITCH not in running:
        raise LabError(f"lab {lab.name} is not up", f"scripts/lab up 2 --name {lab.name}")
    known = known_host_names(lab, running)
    if host not in known:
        raise LabError(f"lab {lab.name} has no host {host}", f"its hosts: {', '.join(known)}")
    if host not in running:
        raise LabError(f"{host} is down", f"scripts/lab up {len(known)} --name {lab.name}")
    return running[SWITCH], running[host]


def cut(lab: Lab, host: str) -> None:
    switch, _ = running_host(lab, host)
    set_cable(switch, host, passes=False)


def heal(lab: Lab, host: str) -> None:
    switch, _ = running_host(lab, host)
    set_cable(switch, host, passes=True)


def part(lab: Lab, one: str, other: str) -> None:
    for host in {one, other} - {OPERATOR}:
        running_host(lab, host)
    subnet = operator_subnet(lab)
    if one == other or subnet is None:
        raise LabError(f"{one} and {other} cannot be parted", "name two, as: part operator n2")
    host, peer = (other, one) if one == OPERATOR else (one, other)
    if peer == OPERATOR:
        lose(None, lab.link, str(host_at(subnet, int(host[1:])).address))
    else:
        lose(running_host(lab, host)[1], "eth0", str(host_at(subnet, int(peer[1:])).address))


def kill(lab: Lab, host: str) -> None:
    running_host(lab, host)
    end(lab, host)


def run(lab: Lab, host: str, command: Sequence[str]) -> NoReturn:
    running_host(lab, host)
    argv = ["ssh", "-F", str(lab.ssh_config), host]
    if command:
        argv += ["--", shlex.join(command)]
    os.execvp("ssh", argv)
