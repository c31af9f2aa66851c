"""Getting in: host keys, credentials, the way there, and what is said when it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from sshd_server import (
    LOOPBACK,
    USER,
    Sshd,
    agent,
    key_fingerprint,
    make_key,
    public_key,
    relay_command,
)

from mtppp.errors import ConnectFailed
from mtppp.hosts.known_hosts import recorded_name
from mtppp.hosts.ssh import SshTarget, SshTransport

StartSshd = Callable[..., Sshd]


def works(server: Sshd, **changes: object) -> bool:
    with server.transport(**changes) as transport:
        return transport.run(["echo", "in"], timeout=60).stdout == "in\n"


def failure(target: SshTarget) -> ConnectFailed:
    with contextlib.closing(SshTransport(target)) as transport:
        with pytest.raises(ConnectFailed) as caught:
            transport.connect()
        assert caught.value.host == target.host
        return caught.value


# Credentials


@pytest.mark.parametrize(
    ("kind", "form"), [("ed25519", "RFC4716"), ("ecdsa", "PEM"), ("rsa", "RFC4716"), ("rsa", "PEM")]
)
def test_identity_file(start_sshd: StartSshd, tmp_path: Path, kind: str, form: str) -> None:
    server = start_sshd()
    key = make_key(tmp_path / "key", kind, form=form)
    server.authorized_keys.write_text(public_key(key))
    assert works(server, identity_file=key)


def test_default_identity_file(sshd: Sshd, home: Path) -> None:
    (home / ".ssh" / "id_ed25519").write_bytes(sshd.client_key.read_bytes())
    assert works(sshd, identity_file=None)


def test_agent(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(tmp_path, sshd.client_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        assert works(sshd, identity_file=None)


def test_encrypted_identity_file_that_the_agent_holds(
    start_sshd: StartSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_sshd("MaxAuthTries 1")
    others = [make_key(tmp_path / f"other{n}") for n in range(3)]
    key = make_key(tmp_path / "locked", passphrase="secret")
    server.authorized_keys.write_text(public_key(key))
    key.with_suffix(".pub").unlink()
    with agent(tmp_path, *others, key, passphrase="secret") as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        assert works(server, identity_file=key)


def test_encrypted_identity_file_that_no_agent_holds(sshd: Sshd, tmp_path: Path) -> None:
    key = make_key(tmp_path / "locked", passphrase="secret")
    error = failure(sshd.target(identity_file=key))
    assert f"{key} is encrypted and no agent holds it" in error.message
    assert error.hint == f"ssh-add {key}"


def test_refused_key_names_the_user_the_methods_and_the_key(sshd: Sshd, tmp_path: Path) -> None:
    key = make_key(tmp_path / "stranger")
    error = failure(sshd.target(identity_file=key, user=USER))
    assert f"authentication refused for user '{USER}'" in error.message
    assert "the server takes publickey" in error.message
    assert error.details == (f"refused: {key} {key_fingerprint(key)}",)


def test_unknown_user_is_refused_as_that_user(sshd: Sshd) -> None:
    error = failure(sshd.target(user="nobody-of-that-name"))
    assert "authentication refused for user 'nobody-of-that-name'" in error.message


def test_no_key_to_offer(sshd: Sshd, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    error = failure(sshd.target(identity_file=missing))
    assert "there is no key to offer" in error.message
    assert error.details == (f"{missing}: No such file or directory",)


def test_server_that_takes_no_keys(start_sshd: StartSshd) -> None:
    server = start_sshd("PubkeyAuthentication no\nPasswordAuthentication yes\nPermitRootLogin yes")
    assert "the server takes password, not publickey" in failure(server.target()).message


def test_server_that_asks_for_more_than_a_key(start_sshd: StartSshd) -> None:
    server = start_sshd(
        "AuthenticationMethods publickey,password\nPasswordAuthentication yes\nPermitRootLogin yes"
    )
    error = failure(server.target())
    assert error.details[0].startswith("accepted, but password is also asked for")


def test_too_many_keys(
    start_sshd: StartSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_sshd("MaxAuthTries 2")
    keys = [make_key(tmp_path / f"key{n}") for n in range(4)]
    with agent(tmp_path, *keys, server.client_key) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        error = failure(server.target(identity_file=None))
    assert "the connection ended during authentication" in error.message
    assert "MaxAuthTries" in error.hint
    assert len(error.details) == 2


# Host keys


def test_unknown_host_key_says_how_to_add_it(sshd: Sshd, tmp_path: Path) -> None:
    target = sshd.target(known_hosts=tmp_path / "known hosts")
    error = failure(target)
    fingerprint = key_fingerprint(sshd.host_keys["ed25519"])
    assert f"unknown host key ssh-ed25519 {fingerprint}" in error.message
    command = error.hint.partition("Then:\n$ ")[2]
    subprocess.run(["sh", "-c", command], check=True, stderr=subprocess.DEVNULL)
    with contextlib.closing(SshTransport(target)) as transport:
        transport.connect()


def test_changed_host_key_is_loud(sshd: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    known_hosts = tmp_path / "known_hosts"
    name = recorded_name(LOOPBACK, sshd.port)
    known_hosts.write_text(f"# mine\n{name} {public_key(other)}\n")
    error = failure(sshd.target(known_hosts=known_hosts))
    assert "THE HOST KEY HAS CHANGED" in error.message
    assert error.details == (
        f"presented: ssh-ed25519 {key_fingerprint(sshd.host_keys['ed25519'])}",
        f"recorded:  ssh-ed25519 {key_fingerprint(other)} ({known_hosts}:2)",
    )
    command = error.hint.partition("the right one:\n$ ")[2]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert works(sshd, known_hosts=known_hosts)


def test_revoked_host_key(sshd: Sshd, tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(sshd.known_line() + "@revoked * " + sshd.known_line().split(" ", 1)[1])
    error = failure(sshd.target(known_hosts=known_hosts))
    assert "THE HOST KEY IS REVOKED" in error.message
    assert f"{known_hosts}:2" in error.message


def test_hashed_known_hosts(sshd: Sshd, tmp_path: Path) -> None:
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(sshd.known_line())
    subprocess.run(
        ["ssh-keygen", "-q", "-H", "-f", str(known_hosts)], check=True, capture_output=True
    )
    assert LOOPBACK not in known_hosts.read_text()
    assert works(sshd, known_hosts=known_hosts)


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_the_known_type_of_host_key_is_asked_for(sshd: Sshd, tmp_path: Path, kind: str) -> None:
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(sshd.known_line(kind))
    assert works(sshd, known_hosts=known_hosts)


def test_rsa_host_key(start_sshd: StartSshd) -> None:
    server = start_sshd(host_keys=("ed25519", "rsa"))
    server.known_hosts.write_text(server.known_line("rsa"))
    assert works(server)


def test_only_other_types_of_host_key_are_known(start_sshd: StartSshd, tmp_path: Path) -> None:
    server = start_sshd()
    ecdsa = make_key(tmp_path / "old", "ecdsa")
    server.known_hosts.write_text(f"{recorded_name(LOOPBACK, server.port)} {public_key(ecdsa)}")
    assert "HAS CHANGED" in failure(server.target()).message


def test_host_key_alias(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n HostKeyAlias node-a\n")
    known_hosts = tmp_path / "known_hosts"
    target = sshd.target(config_file=config, known_hosts=known_hosts)
    command = failure(target).hint.partition("Then:\n$ ")[2]
    subprocess.run(["sh", "-c", command], check=True)
    assert known_hosts.read_text() == sshd.known_line(name="node-a")
    assert works(sshd, config_file=config, known_hosts=known_hosts)


def test_default_known_hosts(sshd: Sshd, home: Path) -> None:
    assert "unknown host key" in failure(sshd.target(known_hosts=None)).message
    (home / ".ssh" / "known_hosts").write_text(sshd.known_line())
    assert works(sshd, known_hosts=None)


# The ssh client's configuration


def test_configured_host(sshd: Sshd, home: Path) -> None:
    (home / ".ssh" / "nodes").write_text(
        f"""
        Host node-a
            HostName {LOOPBACK}
            Port {sshd.port}
            User {USER}
            IdentityFile {sshd.client_key}
            IdentitiesOnly yes
            UserKnownHostsFile {sshd.known_hosts}
        """
    )
    (home / ".ssh" / "config").write_text("Include nodes\n")
    with contextlib.closing(SshTransport(SshTarget("node-a"))) as transport:
        assert transport.run(["id", "-un"], timeout=60).stdout.strip() == USER


def test_explicit_settings_win(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"""
        Host {LOOPBACK}
            Port 1
            User nobody-of-that-name
            IdentityFile /nonexistent
            UserKnownHostsFile /nonexistent
        """
    )
    assert works(sshd, config_file=config, user=USER)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Port nonsense", "nonsense"),
        ("\nIdentityFile %z", "%z in '%z' is not supported"),
        ("\nHost 'a", "line 2 of "),
        ("ConnectTimeout soon", "'soon' is not a time"),
        ("Match localnetwork 10.0.0.0/8\n User x", "`Match localnetwork` is not supported"),
        ("ProxyJump a:b:c", "'a:b:c' is not [user@]host[:port]"),
        (None, "No such file"),
    ],
)
def test_unusable_configuration(tmp_path: Path, text: str | None, reason: str) -> None:
    config = tmp_path / "config"
    if text is not None:
        config.write_text(text)
    error = failure(SshTarget("node-a", config_file=config))
    assert str(config) in error.message
    assert reason in error.message


# The way there


def test_name_that_does_not_resolve() -> None:
    assert "the name does not resolve" in failure(SshTarget("no-such-host.invalid")).message


def test_connection_refused() -> None:
    port = free_port()
    error = failure(SshTarget(LOOPBACK, port=port))
    assert f"{LOOPBACK}: port {port}: connection refused" in error.message


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_an_address_that_no_host_has(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the network of a host that is down says: none of these tests' own is without it."""

    def unreachable(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_connection", unreachable)
    error = failure(SshTarget(LOOPBACK))
    assert error.message.endswith(f"port 22: cannot connect: {os.strerror(number)}")
    assert error.hint == "Is the host up, is that its address, and does a route lead there?"


def test_connection_timeout() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((LOOPBACK, 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        # With its queue full, the listener answers no more.
        stack.enter_context(socket.create_connection((LOOPBACK, port)))
        error = failure(SshTarget(LOOPBACK, port=port, connect_timeout=0.3))
    assert "timed out: no answer within 0.3 s" in error.message


def test_no_banner() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        error = failure(SshTarget(LOOPBACK, port=port, connect_timeout=0.3))
    assert "sent no SSH banner within 0.3 s" in error.message


@contextlib.contextmanager
def answering(answer: str) -> Iterator[int]:
    """A server that sends `answer` and closes: yields its port."""
    script = (
        "import socket; listener = socket.create_server(('127.0.0.1', 0));"
        "print(listener.getsockname()[1], flush=True); peer, _ = listener.accept();"
        f"peer.sendall({answer!r}.encode()); peer.shutdown(socket.SHUT_WR); peer.recv(9999)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "closed the connection before its SSH banner"),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", "closed the connection before its SSH banner"),
        ("SSH-1.5-old\r\n", "no algorithms in common"),
        ("SSH-2.0-broken\r\n", "closed, or stalled, during the key exchange"),
    ],
)
def test_server_that_is_none(answer: str, reason: str) -> None:
    with answering(answer) as port:
        assert reason in failure(SshTarget(LOOPBACK, port=port)).message


def test_no_algorithms_in_common(start_sshd: StartSshd) -> None:
    server = start_sshd("KexAlgorithms sntrup761x25519-sha512@openssh.com")
    assert "no algorithms in common" in failure(server.target()).message


def test_jump_hosts(start_sshd: StartSshd, sshd: Sshd, tmp_path: Path) -> None:
    hops = [start_sshd("AllowTcpForwarding local"), start_sshd("AllowTcpForwarding local")]
    config = tmp_path / "config"
    config.write_text(
        "".join(f"Host hop{n}\n HostName {LOOPBACK}\n Port {hops[n].port}\n" for n in range(2))
        + f"Host node\n HostName {LOOPBACK}\n Port {sshd.port}\n ProxyJump hop0,{USER}@hop1\n"
    )
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text("".join(server.known_line() for server in (*hops, sshd)))
    target = SshTarget(
        "node", identity_file=sshd.client_key, config_file=config, known_hosts=known_hosts
    )
    with contextlib.closing(SshTransport(target)) as transport:
        data = bytes(2_000_000)
        assert len(transport.run(["cat"], stdin=data, timeout=60).stdout) == len(data)
    for hop in hops:
        assert "Accepted publickey" in (hop.directory / "log").read_text()


def test_jump_host_keys_are_checked(start_sshd: StartSshd, sshd: Sshd, tmp_path: Path) -> None:
    hop = start_sshd()
    error = failure(sshd.target(proxy_jump=f"{LOOPBACK}:{hop.port}"))
    assert f"jump host {LOOPBACK}:{hop.port}: unknown host key" in error.message
    assert "ssh-keyscan" in error.hint
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(hop.known_line())
    target = sshd.target(proxy_jump=f"{LOOPBACK}:{hop.port}", known_hosts=known_hosts)
    error = failure(target)
    assert error.message.startswith(f"{LOOPBACK}: port {sshd.port}: unknown host key")
    # The target may be out of reach of ssh-keyscan, so its key itself is in the command.
    command = error.hint.partition("Then:\n$ ")[2]
    assert shlex.split(command)[0] == "echo"
    subprocess.run(["sh", "-c", command], check=True)
    with contextlib.closing(SshTransport(target)) as transport:
        transport.connect()


def test_jump_host_that_cannot_reach_the_target(start_sshd: StartSshd) -> None:
    hop = start_sshd()
    target = hop.target(port=free_port(), proxy_jump=f"{LOOPBACK}:{hop.port}")
    assert "the jump host before it cannot connect to it" in failure(target).message


def test_jump_host_that_does_not_forward(start_sshd: StartSshd, sshd: Sshd) -> None:
    hop = start_sshd("AllowTcpForwarding no")
    hop.known_hosts.write_text(hop.known_line() + sshd.known_line())
    target = hop.target(port=sshd.port, proxy_jump=f"{LOOPBACK}:{hop.port}")
    assert "the jump host before it does not allow forwarding" in failure(target).message


def test_jumps_in_circles(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    assert "goes in circles" in failure(SshTarget("a", config_file=config)).message


def test_proxy_command(sshd: Sshd, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    config = tmp_path / "config"
    command = f"sh -c 'echo $$ > {pid}; exec {relay_command(tmp_path)} %h %p'"
    config.write_text(f"Host node\n HostName {LOOPBACK}\n ProxyCommand {command}\n")
    target = sshd.target(host="node", config_file=config)
    with contextlib.closing(SshTransport(target)) as transport:
        assert transport.run(["echo", "in"], timeout=60).stdout == "in\n"
        assert Path(f"/proc/{pid.read_text().strip()}").exists()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_proxy_command_that_fails(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host *\n ProxyCommand sh -c 'echo no way to %h >&2; exit 1'\n")
    error = failure(sshd.target(config_file=config))
    assert "closed the connection before its SSH banner" in error.message
    assert error.details == (f"no way to {LOOPBACK}",)
