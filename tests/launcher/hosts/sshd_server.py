"""Real OpenSSH servers, agents and keys for the tests, and a network that can be disturbed."""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from free_ports import free_port

from mtppp.hosts.known_hosts import fingerprint, recorded_name
from mtppp.hosts.ssh import SshTarget, SshTransport

SSHD = "/usr/sbin/sshd"
LOOPBACK = "127.0.0.1"
USER = getpass.getuser()


def make_key(
    path: Path, kind: str = "ed25519", *, passphrase: str = "", form: str = "RFC4716"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    bits = ["-b", "2048"] if kind == "rsa" else []
    options = ["-t", kind, *bits, "-m", form, "-N", passphrase, "-C", path.name]
    command = ["ssh-keygen", "-q", *options, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


def public_key(path: Path) -> str:
    """The type and the base64 of the public key that belongs to a private one."""
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def key_fingerprint(path: Path) -> str:
    return fingerprint(base64.b64decode(public_key(path).split()[1]))


def has_ended(pid: int) -> bool:
    """Wait for a process of somebody's to end, be it that nobody asks for its status."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class Sshd:
    """An sshd of the user who runs the tests, which lets in the holder of `client_key`."""

    def __init__(
        self,
        directory: Path,
        client_key: Path,
        *,
        settings: str = "",
        host_keys: tuple[str, ...] = ("ed25519",),
    ) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.client_key = client_key
        self.port = free_port()
        self.host_keys = {kind: make_key(directory / f"host_{kind}", kind) for kind in host_keys}
        self.authorized_keys = directory / "authorized_keys"
        self.authorized_keys.write_text(public_key(client_key) + "\n")
        self.known_hosts = directory / "known_hosts"
        self.known_hosts.write_text(self.known_line())
        configuration = [
            *settings.splitlines(),
            f"ListenAddress {LOOPBACK}:{self.port}",
            *(f"HostKey {key}" for key in self.host_keys.values()),
            f"AuthorizedKeysFile {self.authorized_keys}",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 500",
            # As in a shell within a shell, where bash passes over the developer's own .bashrc.
            "SetEnv SHLVL=2",
        ]
        (directory / "sshd_config").write_text("\n".join(configuration) + "\n")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [SSHD, "-D", "-f", directory / "sshd_config", "-E", directory / "log"]
        )
        self._await_start()

    def _await_start(self) -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), 1):
                return
        raise AssertionError(f"sshd did not start: {(self.directory / 'log').read_text()}")

    def known_line(self, kind: str = "ed25519", name: str | None = None) -> str:
        name = name or recorded_name(LOOPBACK, self.port)
        return f"{name} {public_key(self.host_keys[kind])}\n"

    def target(self, **changes: object) -> SshTarget:
        settings: dict[str, object] = {
            "host": LOOPBACK,
            "port": self.port,
            "identity_file": self.client_key,
            "known_hosts": self.known_hosts,
            **changes,
        }
        return SshTarget(**settings)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def transport(self, **changes: object) -> Iterator[SshTransport]:
        with contextlib.closing(SshTransport(self.target(**changes))) as transport:
            yield transport

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@contextlib.contextmanager
def agent(directory: Path, *keys: Path, passphrase: str = "") -> Iterator[str]:
    """An ssh-agent that holds `keys`: yields the path of its socket."""
    path = str(directory / "agent.sock")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        while not Path(path).exists():
            assert process.poll() is None
            time.sleep(0.005)
        askpass = directory / "askpass"
        askpass.write_text(f"#!/bin/sh\necho {passphrase}\n")
        askpass.chmod(0o700)
        environment = {
            **os.environ,
            "SSH_AUTH_SOCK": path,
            "SSH_ASKPASS": str(askpass),
            "SSH_ASKPASS_REQUIRE": "force",
        }
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environment)
        yield path
    finally:
        process.terminate()
        process.wait(10)


# Does not end by itself when the connection does.
_RELAY_SCRIPT = """
import os, select, socket, sys, time
rate = float({rate})
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for ready in select.select([0, peer], [], [])[0]:
        data = os.read(0 if ready == 0 else peer.fileno(), 16384)
        if not data:
            time.sleep(600)
        os.write(peer.fileno() if ready == 0 else 1, data)
        time.sleep(len(data) / rate)
"""


def relay_command(directory: Path, rate: float = float("inf")) -> str:
    """A ProxyCommand that passes `rate` bytes per second, without its two arguments."""
    script = directory / "relay.py"
    script.write_text(_RELAY_SCRIPT.format(rate=repr(str(rate))))
    return f"{sys.executable} {script}"


class Relay:
    """A TCP relay to a port, by default of this machine, that can be slow, and be cut.

    Attributes:
        delay: seconds by which everything is late.
        rate: bytes per second that pass in each direction; None for no limit.
        cut: whether nothing passes any more, in either direction.
    """

    def __init__(
        self, target_port: int, *, address: str = LOOPBACK, rate: float | None = None
    ) -> None:
        self.delay = 0.0
        self.rate = rate
        self.cut = False
        self._target = (address, target_port)
        self._stopped = threading.Event()
        self._listener = socket.socket()
        if rate is not None:
            # What buffers could hold would not be noticed to be late.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self._listener.bind((LOOPBACK, 0))
        self._listener.listen()
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def stop(self) -> None:
        self._stopped.set()
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        passing = []
        while not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    passing.append(threading.Thread(target=self._pass, args=(source, sink)))
                    passing[-1].start()
        for thread in passing:
            thread.join()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass on what comes, each piece `delay` seconds after it came."""
        waiting: list[tuple[float, bytes]] = []
        # The other direction's thread closes `source`, after which select refuses it.
        with contextlib.suppress(OSError, ValueError), sink:
            while not self._stopped.wait(0.005 if self.cut else 0):
                if self.cut:
                    continue
                if select.select([source], [], [], 0.005)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    waiting.append((time.monotonic() + self.delay, data))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, data = waiting.pop(0)
                    sink.sendall(data)
                    if self.rate is not None:
                        time.sleep(len(data) / self.rate)
