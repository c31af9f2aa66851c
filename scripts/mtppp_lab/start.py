"""Starting the switch and hosts, plugging their cables in, waiting until they answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .console import LabError
from .kernel import cables_up, call, in_switch, members
from .names import BRIDGE, MARK, OPERATOR, OPERATOR_INDEX, PRIVATE, SWITCH, Host, Lab, Subnet

START_SECONDS = 60.0
PROGRAM = Path(__file__).resolve().parents[1] / "lab"


def tail(log: Path) -> str:
    """The last lines of a log, as the end of a message."""
    lines = log.read_text().splitlines()[-8:] if log.exists() else []
    return "".join(f"\n  {line}" for line in lines)


class Starting:
    """A member on its way: talks with `run_member` over its standard input and output."""

    def __init__(self, lab: Lab, member: str, lock_descriptor: int, **parameters: Any) -> None:
        self.member = member
        parameters |= {"lab": lab.name, "member": member, "lock": lock_descriptor}
        self.log = lab.member_directory(member) / "boot.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-B", str(PROGRAM), "_member", json.dumps(parameters)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {MARK: f"{lab.name}/{member}"},
                start_new_session=True,
                pass_fds=[lock_descriptor],
            )

    def says(self, deadline: float) -> str:
        """The next line the member writes."""
        output: IO[bytes] | None = self.process.stdout
        assert output is not None
        text = b""
        while not text.endswith(b"\n"):
            readable, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(output.fileno(), 64) if readable else b""
            if not chunk:
                why = "ended" if readable else f"was not ready within {START_SECONDS:.0f} s"
                raise LabError(f"{self.member} {why} while starting{tail(self.log)}")
            text += chunk
        return text.decode().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()


def start_switch(lab: Lab, subnet: Subnet, lock_descriptor: int, deadline: float) -> int:
    switch = Starting(lab, SWITCH, lock_descriptor)
    switch.says(deadline)
    pid = switch.process.pid
    operator = Host(OPERATOR, subnet[OPERATOR_INDEX])
    plug = (
        f"link add {OPERATOR} type veth peer name {lab.link} address {operator.mac} "
        f"netns {os.getpid()}\nlink set {OPERATOR} master {BRIDGE} up"
    )
    in_switch(pid, "ip", "-batch", "-", stdin=plug)
    address = f"address add {operator.address}/{subnet.prefixlen} dev {lab.link}"
    call("ip", "-batch", "-", stdin=f"{address}\nlink set {lab.link} up")
    return pid


def start_hosts(
    lab: Lab,
    subnet: Subnet,
    hosts: Sequence[Host],
    *,
    switch: int,
    shares: Sequence[str],
    lock_descriptor: int,
    deadline: float,
) -> None:
    if not hosts:
        return
    starting = {
        host: Starting(
            lab,
            host.name,
            lock_descriptor,
            address=f"{host.address}/{subnet.prefixlen}",
            shares=list(shares),
        )
        for host in hosts
    }
    # The cable of a host that died goes with its namespace: any moment now, or already.
    for name in set(cables_up(switch)) & {host.name for host in hosts}:
        with contextlib.suppress(LabError):
            in_switch(switch, "ip", "link", "delete", name)
    commands = []
    for host, member in starting.items():
        pid = int(member.says(deadline))
        member.process.wait()
        commands += [
            f"link add {host.name} type veth peer name eth0 address {host.mac} netns {pid}",
            f"link set {host.name} master {BRIDGE} up",
        ]
    in_switch(switch, "ip", "-batch", "-", stdin="\n".join(commands))
    for member in starting.values():
        member.go()
    for member in starting.values():
        member.says(deadline)


def wait_for_sshd(lab: Lab, host: Host, deadline: float) -> None:
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((str(host.address), 22), timeout=1) as connection,
        ):
            if connection.recv(4) == b"SSH-":
                return
        alive = members(lab)
        if SWITCH not in alive:
            raise LabError(f"{host.name}: cut off, the lab's switch has ended")
        if host.name not in alive:
            break
        time.sleep(0.05)
    log = lab.member_directory(host.name) / PRIVATE["/var/log"] / "sshd.log"
    raise LabError(
        f"{host.name}: no sshd at {host.address}:22{tail(log)}",
        "a firewall on this machine may drop what goes out to or comes in from "
        f"{lab.link}, or the sshd configuration may not suit this OpenSSH",
    )
