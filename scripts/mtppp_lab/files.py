"""The files a lab is made of: keys, and the set-up of ssh servers and of the client."""

from __future__ import annotations

import pwd
from collections.abc import Sequence
from pathlib import Path

from .kernel import call
from .names import OPERATOR, OPERATOR_INDEX, SWITCH, Host, Lab, Subnet


def sshd_config(lab: Lab, host: str) -> str:
    # SHLVL: bash reads ~/.bashrc in a session of sshd's unless it is a shell in a shell. What a
    # session finds must not depend on what is in this machine's.
    return f"""\
AddressFamily inet
HostKey {lab.host_key(host)}
AuthorizedKeysFile {lab.identity}.pub
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserRC no
UsePAM no
UseDNS no
X11Forwarding no
PrintMotd no
PrintLastLog no
PidFile none
MaxStartups 1000
MaxSessions 1000
LoginGraceTime 30
ClientAliveInterval 15
ClientAliveCountMax 3
SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 SHLVL=1
Subsystem sftp internal-sftp
"""


def client_config(lab: Lab, hosts: Sequence[Host]) -> str:
    addresses = "".join(f"Host {host.name}\n    HostName {host.address}\n\n" for host in hosts)
    return f"""\
{addresses}Host *
    User root
    IdentityFile {lab.identity}
    IdentitiesOnly yes
    UserKnownHostsFile {lab.known_hosts}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    ServerAliveInterval 15
    LogLevel ERROR
"""


def known_hosts(lab: Lab, hosts: Sequence[Host]) -> str:
    lines = []
    for host in hosts:
        kind, key = lab.host_key(host.name).with_suffix(".pub").read_text().split()[:2]
        lines.append(f"{host.name},{host.address} {kind} {key}\n")
    return "".join(lines)


def etc_hosts(subnet: Subnet, hosts: Sequence[Host]) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{host.address} {host.name}" for host in hosts]
    lines += [f"{subnet[OPERATOR_INDEX]} {OPERATOR}"]
    return "\n".join(lines) + "\n"


def etc_shadow() -> str:
    """Every user without a password: sshd refuses accounts that are locked on this machine."""
    return "".join(f"{user.pw_name}:*:::::::\n" for user in pwd.getpwall())


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write in place, since hosts have these files bind-mounted; leave equal files alone."""
    if path.exists() and path.read_text() == text:
        return
    path.touch(mode=mode)
    path.write_text(text)


def make_key(path: Path) -> None:
    public = path.with_suffix(".pub")
    if path.exists() and public.exists() and public.stat().st_size:
        return
    path.unlink(missing_ok=True)
    public.unlink(missing_ok=True)
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "mtppp-lab", "-f", str(path))


def write_files(lab: Lab, subnet: Subnet, hosts: Sequence[Host]) -> None:
    lab.member_directory(SWITCH).mkdir(parents=True, exist_ok=True)
    make_key(lab.identity)
    for host in hosts:
        directory = lab.member_directory(host.name)
        directory.mkdir(exist_ok=True)
        make_key(lab.host_key(host.name))
        write(directory / "sshd_config", sshd_config(lab, host.name))
    write(lab.directory / "hosts", etc_hosts(subnet, hosts))
    write(lab.directory / "shadow", etc_shadow(), mode=0o600)
    write(lab.known_hosts, known_hosts(lab, hosts))
    write(lab.ssh_config, client_config(lab, hosts))
