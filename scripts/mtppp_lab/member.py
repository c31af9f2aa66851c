"""What runs inside: the switch, and the init of a host."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .console import LabError
from .kernel import call
from .names import BRIDGE, CLEARED_AT_BOOT, PRIVATE, SWITCH, Lab

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000


def unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        why = os.strerror(ctypes.get_errno())
        raise LabError(f"cannot make namespaces: {why}; a container has to be privileged for it")


def mount(*arguments: str) -> None:
    call("mount", *arguments)


def mount_host(lab: Lab, host: str, shares: Sequence[str]) -> None:
    """Give the host its own view of the file system. Runs in its mount namespace."""
    directory = lab.member_directory(host)
    mount("--make-rprivate", "/")
    for name in CLEARED_AT_BOOT:
        shutil.rmtree(directory / name, ignore_errors=True)
    for path, name in PRIVATE.items():
        (directory / name).mkdir(exist_ok=True)
        (directory / name).chmod(Path(path).stat().st_mode & 0o7777)
    for share in shares:
        for path, name in PRIVATE.items():
            if Path(share).is_relative_to(path):
                target = directory / name / Path(share).relative_to(path)
                target.mkdir(parents=True, exist_ok=True)
                mount("--rbind", share, str(target))
    for path, name in PRIVATE.items():
        mount("--rbind", str(directory / name), path)
    for name in ("hosts", "shadow"):
        mount("--bind", str(lab.directory / name), f"/etc/{name}")
    mount("-t", "proc", "-o", "nosuid,nodev,noexec", "proc", "/proc")
    mount("-t", "tmpfs", "-o", "nosuid,nodev,mode=1777", "shm", "/dev/shm")
    # A fresh sysfs shows this namespace's network devices. It comes without the control groups.
    cgroup = Path("/run/cgroup")
    cgroup.mkdir()
    mount("--rbind", "/sys/fs/cgroup", str(cgroup))
    mount("-t", "sysfs", "-o", "nosuid,nodev,noexec", "sysfs", "/sys")
    mount("--move", str(cgroup), "/sys/fs/cgroup")
    cgroup.rmdir()
    Path("/run/sshd").mkdir(mode=0o755)
    Path("/run/lock").mkdir(mode=0o1777)


def ready(lock_descriptor: int) -> None:
    """Tell `up`, let go of the lock and of `up`'s pipes."""
    os.write(1, b"ready\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    os.close(lock_descriptor)


def run_switch(lock_descriptor: int) -> NoReturn:
    unshare(CLONE_NEWNET)
    call("ip", "link", "add", BRIDGE, "up", "type", "bridge", "stp_state", "0")
    ready(lock_descriptor)
    while True:
        signal.pause()


def run_host(
    lab: Lab, host: str, address: str, shares: Sequence[str], lock_descriptor: int
) -> NoReturn:
    """Become the host's init: set the host up, run sshd, reap orphans; end when sshd ends."""
    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET)
    if pid := os.fork():
        os.write(1, f"{pid}\n".encode())
        os._exit(0)
    # `up` now plugs eth0 in. If it is killed meanwhile, nobody needs this host.
    if os.read(0, 3) != b"go\n":
        sys.exit(1)
    os.chdir("/")
    socket.sethostname(host)
    mount_host(lab, host, shares)
    commands = ["link set lo up", f"address add {address} dev eth0", "link set eth0 up"]
    call("ip", "-batch", "-", stdin="\n".join(commands))
    sshd = shutil.which("sshd")
    assert sshd is not None, "`up` has checked"
    with Path("/var/log/sshd.log").open("a") as log:
        server = subprocess.Popen(
            [sshd, "-D", "-e", "-f", str(lab.member_directory(host) / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )
    ready(lock_descriptor)
    while os.wait()[0] != server.pid:
        pass
    sys.exit("sshd has ended, and the host with it")


def run_member(parameters: dict[str, Any]) -> NoReturn:
    lab, member, descriptor = Lab(parameters["lab"]), parameters["member"], parameters["lock"]
    try:
        if member == SWITCH:
            run_switch(descriptor)
        run_host(lab, member, parameters["address"], parameters["shares"], descriptor)
    except LabError as error:
        sys.exit(str(error))
