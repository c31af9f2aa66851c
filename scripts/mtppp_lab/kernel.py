"""What there is of a lab, as the kernel tells: processes, links, subnets."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
from pathlib import Path

from .console import LabError
from .names import MARK, SWITCH, Lab, Subnet


def call(*argv: str, stdin: str | None = None) -> str:
    """Run a command to its end and return its output.

    The command inherits the lock: should `scripts/lab` be killed, whoever comes next waits for it.
    """
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, close_fds=False, check=False
    )
    if done.returncode:
        raise LabError(f"`{shlex.join(argv)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


NOBODY = "02:00:00:00:00:00"


def in_switch(pid: int, *argv: str, stdin: str | None = None) -> str:
    return call("nsenter", "--net", "--target", str(pid), "--", *argv, stdin=stdin)


def mark_of(pid: int) -> tuple[str, str] | None:
    """The lab and the member that a process belongs to, from its environment."""
    with contextlib.suppress(OSError):
        environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        _, found, rest = environment.partition(f"\0{MARK}=".encode())
        if found:
            lab, _, member = rest.partition(b"\0")[0].decode().partition("/")
            return lab, member
    return None


def marked(lab: Lab) -> dict[int, str]:
    """Processes of the lab: pid -> the member they belong to.

    Of what runs in a host these are few; the others end with the host's init.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    marks = {pid: mark for pid in pids if (mark := mark_of(pid))}
    return {pid: member for pid, (name, member) in marks.items() if name == lab.name}


def is_init(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return len(line.split()) > 2 and line.split()[-1] == "1"
    return False


def members(lab: Lab) -> dict[str, int]:
    """The running members, the switch and the hosts: name -> pid of the switch or host's init."""
    return {name: pid for pid, name in marked(lab).items() if name == SWITCH or is_init(pid)}


def operator_subnet(lab: Lab) -> Subnet | None:
    for link in json.loads(call("ip", "-json", "-4", "address", "show")):
        if link.get("ifname") == lab.link:
            for address in link["addr_info"]:
                return Subnet(f"{address['local']}/{address['prefixlen']}", strict=False)
    return None


def link_names() -> list[str]:
    return [str(link["ifname"]) for link in json.loads(call("ip", "-json", "link", "show"))]


def cables_up(switch: int) -> dict[str, bool]:
    """The switch's ends of the hosts' cables: host -> whether traffic passes."""
    links = json.loads(in_switch(switch, "ip", "-json", "link", "show", "type", "veth"))
    return {str(link["ifname"]): "UP" in link["flags"] for link in links if link}


def set_cable(switch: int, host: str, *, passes: bool) -> None:
    in_switch(switch, "ip", "link", "set", host, "up" if passes else "down")


def lose(pid: int | None, device: str, address: str) -> None:
    """Let what a member, or the operator without a pid, sends to an address go to nobody."""
    entry = f"neigh replace {address} lladdr {NOBODY} nud permanent dev {device}"
    _in_member(pid, "ip", *entry.split())


def lose_nothing(pid: int | None, device: str) -> None:
    _in_member(pid, "ip", "neigh", "flush", "nud", "permanent", "dev", device)


def _in_member(pid: int | None, *argv: str) -> str:
    return call(*argv) if pid is None else in_switch(pid, *argv)


def known_host_names(lab: Lab, running: dict[str, int]) -> list[str]:
    """Hosts that have a directory or a process, in order."""
    names = {path.parent.name for path in lab.directory.glob("n*/sshd_config")}
    names |= set(running) - {SWITCH}
    return sorted(names, key=lambda name: int(name[1:]))


def routed_subnets() -> list[Subnet]:
    """What this machine has routes to, the default route left out."""
    routes = json.loads(call("ip", "-json", "-4", "route", "show"))
    return [Subnet(route["dst"]) for route in routes if route["dst"] != "default"]
