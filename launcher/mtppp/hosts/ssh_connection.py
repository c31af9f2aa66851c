"""An open, authenticated SSH connection: how it comes about, and how its loss is noticed."""

from __future__ import annotations

import contextlib
import errno
import logging
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, cast

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_REQUEST, MSG_CHANNEL_SUCCESS
from paramiko.packet import Packetizer

from mtppp.errors import ConnectFailed
from mtppp.hosts.command import last_lines
from mtppp.hosts.known_hosts import KnownHosts, KnownKey, Standing, fingerprint
from mtppp.hosts.ssh_config import Endpoint
from mtppp.hosts.ssh_identity import Identities, find_identities
from mtppp.hosts.transport import HELD_BEAT

# How long the server may take over one step of the key exchange or the authentication.
_STEP_TIMEOUT = 30.0
_SEND_BYTES = 1 << 15
_CLOSE_PATIENCE = 1.0
_FULL_PAUSE = 0.005
# What a network says of an address at which nobody answers.
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_HINT_UNREACHABLE = "Is the host up, is that its address, and does a route lead there?"
PROHIBITED = 1  # RFC 4254, 5.1: a channel was refused by policy

# Everything that goes wrong ends in an exception here; without a handler, logging would print
# paramiko's accounts of it, tracebacks included, on stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a silent connection is taken for lost.

    Attributes:
        interval: seconds between two signs of life that are asked for, at most.
        patience: seconds of silence after which the connection is lost. Far above any round
            trip: a slow link is not a dead one.
    """

    interval: float = 10.0
    patience: float = 40.0


class Connection:
    """A connection to the last of `route`, through those before it."""

    def __init__(self, host: str, route: Sequence[Endpoint], liveness: Liveness) -> None:
        """Connect.

        Raises:
            ConnectFailed: with the step that failed, and at which of the servers.
        """
        self._closed = threading.Event()
        with contextlib.ExitStack() as stack:
            previous: _Transport | None = None
            for index, endpoint in enumerate(route):
                proxy_errors = stack.enter_context(tempfile.TemporaryFile())
                step = _Step(host, endpoint, index < len(route) - 1, proxy_errors)
                stream = _Stream(_open_stream(step, previous, stack))
                stack.callback(stream.close)
                previous = _Transport(stream)
                stack.callback(_end, previous)
                direct = index == 0 and endpoint.proxy_command is None
                _negotiate(step, previous, reached_directly=direct)
                _authenticate(step, previous)
            if previous is None:
                raise ValueError("an empty route leads nowhere")
            self._stack = stack.pop_all()
        self.transport = previous
        stream.patience = liveness.patience
        interval = min(liveness.interval, route[-1].keepalive_interval)
        threading.Thread(
            target=self._ask_for_signs_of_life,
            args=(interval,),
            name=f"keepalive {host}",
            daemon=True,
        ).start()

    @property
    def is_open(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        self._closed.set()
        self._stack.close()

    def open_session(self, stdin: bytes, timeout: float, *, stays: bool = False) -> Session:
        """A channel for one command; for one that stays, its input is left open.

        Raises:
            paramiko.SSHException, EOFError, OSError: the server gives none, or is gone.
        """
        channel = self.transport.open_session(timeout=timeout)
        return Session(self.transport, channel, stdin, stays=stays)

    def ask_for_a_sign_of_life(self) -> None:
        """Have the server send an answer, and wait for it, or for the end of the connection."""
        # paramiko's own keepalive asks for no answer, so it cannot tell a dead peer. Any answer
        # will do, and servers refuse requests that they do not know.
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self.transport.global_request("keepalive@openssh.com", wait=True)

    def open_forward(self, address: str, port: int, timeout: float) -> Forward:
        """A connection to a port as the server reaches it.

        Raises:
            paramiko.ChannelException: the server does not allow it, or cannot connect.
            paramiko.SSHException, EOFError, OSError: the server does not answer, or is gone.
        """
        channel = self.transport.open_channel(
            "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout
        )
        return Forward(self.transport, channel)

    def _ask_for_signs_of_life(self, interval: float) -> None:
        while not self._closed.wait(interval) and self.transport.is_active():
            self.ask_for_a_sign_of_life()


class _Socket(Protocol):
    """What paramiko wants of a socket."""

    def recv(self, size: int, /) -> bytes: ...
    def send(self, data: bytes, /) -> int: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class _Stream:
    """A socket that fails once the other side has been silent for `patience` seconds.

    paramiko gives sockets a timeout of a tenth of a second and tries again for ever.
    """

    def __init__(self, inner: _Socket) -> None:
        self._inner = inner
        self._heard = time.monotonic()
        self._patience: float | None = None
        self._blocked = False
        self._closed = False

    @property
    def patience(self) -> float | None:
        return self._patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._heard = time.monotonic()
        self._patience = seconds

    def recv(self, size: int) -> bytes:
        try:
            data = self._inner.recv(size)
        except TimeoutError:
            self._fail_if_silent()
            raise
        self._heard = time.monotonic()
        return data

    def send(self, data: bytes) -> int:
        try:
            sent = self._inner.send(data)
        except TimeoutError:
            self._blocked = True
            self._fail_if_silent()
            raise
        if self._blocked:
            # There is room again, so the other side has taken something.
            self._blocked = False
            self._heard = time.monotonic()
        return sent

    def settimeout(self, seconds: float | None) -> None:
        self._inner.settimeout(seconds)

    def close(self) -> None:
        self._closed = True
        self._inner.close()

    def _fail_if_silent(self) -> None:
        silence = time.monotonic() - self._heard
        if self._patience is not None and silence > self._patience:
            # With an errno: paramiko's handler for socket errors fails on one without.
            reason = f"nothing heard for {silence:.0f} s"
            raise ConnectionAbortedError(errno.ECONNABORTED, reason)


class Session:
    """A channel on which one command runs.

    Its input is sent by the connection's own thread. Nothing may follow a channel's CLOSE (RFC
    4254, 5.3): sshd ends the whole connection over it. paramiko answers the server's CLOSE in
    that thread too, so what another thread was just sending would now and then follow the answer.
    """

    def __init__(
        self, transport: _Transport, channel: paramiko.Channel, stdin: bytes, *, stays: bool
    ) -> None:
        self.channel = channel
        self._stdin = stdin
        self._stays = stays
        self._beat_at = time.monotonic()
        self._sent = 0
        self._started = False
        self._over = False
        self._sending = threading.Lock()
        self._users = transport.messages.users
        self.exit_signal: str | None = None
        self._users[channel.get_id()] = self

    def start(self, command: bytes) -> None:
        """Start the command.

        Raises:
            paramiko.SSHException, EOFError, OSError: the server refuses it, or is gone.
        """
        self.channel.exec_command(command)

    def finish(self, last: bytes) -> None:
        """End the input of a command that stays; sent with the server's next message."""
        with self._sending:
            self._stdin += last
            self._stays = False

    def close(self) -> None:
        # Not waited for without end: what is being sent may be stuck in a dead network.
        sent = self._sending.acquire(timeout=_CLOSE_PATIENCE)
        self._over = True
        if sent:
            self._sending.release()
        self._users.pop(self.channel.get_id(), None)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self.channel.close()

    def heard(self, kind: int, message: paramiko.Message) -> None:
        """Take note of a message for the channel. In the connection's thread."""
        if kind == MSG_CHANNEL_SUCCESS:
            self._started = True
        elif kind == MSG_CHANNEL_REQUEST and message.get_text() == "exit-signal":
            message.get_boolean()
            self.exit_signal = message.get_text()

    def send_input(self) -> None:
        """Send what the channel's window has room for. In the connection's thread."""
        if not self._started:
            return
        with self._sending, contextlib.suppress(OSError):
            while not self._over and self.channel.send_ready():
                if self._sent < len(self._stdin):
                    piece = self._stdin[self._sent : self._sent + _SEND_BYTES]
                    self._sent += self.channel.send(piece)
                elif self._stays:
                    self._beat()
                    return
                else:
                    self._over = True
                    self.channel.shutdown_write()

    def _beat(self) -> None:
        """An empty line now and then. Answers to the keepalive see to it that there is a then."""
        if time.monotonic() - self._beat_at >= HELD_BEAT / 2:
            self._beat_at = time.monotonic()
            self.channel.send(b"\n")


class Forward:
    """A connection to a port on the server's side, to be used as a socket.

    Unlike a session's input, what is to be sent comes at any time, while the connection's thread
    may be waiting for a message. So other threads send, and that thread holds back a CLOSE until
    none of them does.
    """

    def __init__(self, transport: _Transport, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._over = False
        self._users = transport.messages.users
        self._users[channel.get_id()] = self

    def recv(self, size: int, /) -> bytes:
        return self._channel.recv(size)

    def sendall(self, data: bytes, /) -> None:
        """Send everything, waiting while the channel's window is full.

        Raises:
            OSError: the channel is closed.
        """
        rest = memoryview(data)
        while rest:
            with self._sending:
                if self._over or self._channel.closed:
                    raise BrokenPipeError(errno.EPIPE, "the channel is closed")
                # Without room, it would wait for the thread that waits for this lock.
                room = self._channel.send_ready()
                if room:
                    rest = rest[self._send(bytes(rest[:_SEND_BYTES])) :]
            if not room:
                time.sleep(_FULL_PAUSE)

    def _send(self, data: bytes) -> int:
        try:
            return self._channel.send(data)
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from error

    def shutdown(self, how: int, /) -> None:
        """End the sending direction; `how` as for a socket."""
        with self._sending:
            if how == socket.SHUT_RD or self._over:
                return
            self._over = True
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._channel.shutdown_write()

    def close(self) -> None:
        with self._sending:
            self._over = True
        self._users.pop(self._channel.get_id(), None)
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()

    def heard(self, kind: int, message: paramiko.Message) -> None:
        """Take note of a message for the channel. In the connection's thread."""
        if kind == MSG_CHANNEL_CLOSE:
            with self._sending:
                self._over = True

    def send_input(self) -> None:
        """Nothing waits to be sent in the connection's thread."""


class _ChannelUser(Protocol):
    """Who uses a channel; both methods are called in the connection's thread."""

    def heard(self, kind: int, message: paramiko.Message) -> None: ...
    def send_input(self) -> None: ...


class _Packetizer(Packetizer):
    """Shows users of channels the messages for these, and lets them send in between."""

    # When the server closes a channel just after paramiko has asked for new keys, paramiko waits
    # for them in the thread that has to negotiate them, and the connection is lost. So ask late:
    # RFC 4344 allows 64 GiB with the ciphers that are left, and OpenSSH takes as much.
    REKEY_BYTES = 1 << 35

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.users: dict[int, _ChannelUser] = {}
        self.may_send = threading.Event()

    def read_message(self) -> tuple[int, paramiko.Message]:
        # The last message has been dealt with, and this is the thread that does that.
        for user in list(self.users.values()):
            # During a key exchange, sending would wait for this thread.
            if self.may_send.is_set():
                user.send_input()
        kind, message = super().read_message()
        if kind in (MSG_CHANNEL_SUCCESS, MSG_CHANNEL_REQUEST, MSG_CHANNEL_CLOSE):
            content = paramiko.Message(message.asbytes())
            user_of = self.users.get(content.get_int())
            if user_of is not None:
                user_of.heard(kind, content)
        return kind, message


class _Transport(paramiko.Transport):
    def __init__(self, stream: _Stream) -> None:
        super().__init__(
            cast(socket.socket, stream),
            packetizer_class=_Packetizer,
            disabled_algorithms={"ciphers": ["3des-cbc"]},
        )
        self.messages = cast(_Packetizer, self.packetizer)
        self.messages.may_send = self.clear_to_send


def _end(transport: _Transport) -> None:
    # Stops the handshake's timer, which would keep the process from ending until it rings.
    transport.packetizer.complete_handshake()
    transport.close()


@dataclass(frozen=True, slots=True)
class _Step:
    """Connecting to one server on the way to `host`.

    Attributes:
        proxy_errors: a file for what a ProxyCommand writes to stderr.
    """

    host: str
    endpoint: Endpoint
    is_jump: bool
    proxy_errors: BinaryIO

    def failed(self, reason: str, *, hint: str = "", details: Sequence[str] = ()) -> ConnectFailed:
        self.proxy_errors.seek(0)
        return ConnectFailed(
            self.host,
            f"{self._where}: {reason}",
            hint=hint,
            details=[*details, *last_lines(self.proxy_errors.read())],
        )

    @property
    def _where(self) -> str:
        """Which server it is, as far as the host's name does not already say it."""
        name, hostname, port = self.endpoint.name, self.endpoint.hostname, self.endpoint.port
        if not self.is_jump:
            return f"port {port}" if hostname == self.host else f"{hostname}:{port}"
        return f"jump host {name}:{port}" + ("" if hostname == name else f" at {hostname}")


def _open_stream(step: _Step, previous: _Transport | None, stack: contextlib.ExitStack) -> _Socket:
    if previous is not None:
        return _open_through(step, previous)
    if step.endpoint.proxy_command is not None:
        return _open_by_command(step, step.endpoint.proxy_command, stack)
    return _open_directly(step)


def _open_directly(step: _Step) -> socket.socket:
    address = (step.endpoint.hostname, step.endpoint.port)
    try:
        opened = socket.create_connection(address, step.endpoint.connect_timeout)
    except socket.gaierror as error:
        raise step.failed(
            f"the name does not resolve ({error.strerror})",
            hint="Check the host's name in cluster.yaml and HostName in the ssh configuration.",
        ) from error
    except ConnectionRefusedError as error:
        raise step.failed(
            "connection refused: nothing listens on that port", hint="Is sshd running there?"
        ) from error
    except TimeoutError as error:
        raise step.failed(
            f"timed out: no answer within {step.endpoint.connect_timeout:g} s",
            hint="Is the host up, and does a firewall let the port through?",
        ) from error
    except OSError as error:
        hint = _HINT_UNREACHABLE if error.errno in _UNREACHABLE else ""
        raise step.failed(f"cannot connect: {error.strerror or error}", hint=hint) from error
    # Requests are small and wait for their answers: never hold one back to fill a packet.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def _open_through(step: _Step, previous: _Transport) -> paramiko.Channel:
    endpoint = step.endpoint
    try:
        return previous.open_channel(
            "direct-tcpip",
            (endpoint.hostname, endpoint.port),
            ("127.0.0.1", 0),
            timeout=endpoint.connect_timeout,
        )
    except paramiko.ChannelException as error:
        reason = (
            "the jump host before it does not allow forwarding"
            if error.code == PROHIBITED
            else "the jump host before it cannot connect to it"
        )
        raise step.failed(reason) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = f"no connection from the jump host before it: {error or type(error).__name__}"
        raise step.failed(reason) from error


def _open_by_command(step: _Step, command: str, stack: contextlib.ExitStack) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=step.proxy_errors,
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return ours


def _negotiate(step: _Step, transport: _Transport, *, reached_directly: bool) -> None:
    """Exchange keys and check the host's."""
    endpoint = step.endpoint
    try:
        known_hosts = KnownHosts.read(endpoint.known_hosts)
    except OSError as error:
        raise step.failed(f"cannot read {error.filename}: {error.strerror}") from error
    options = transport.get_security_options()
    known_types = known_hosts.key_types(endpoint.recorded_names)
    options.key_types = _known_first(options.key_types, known_types)
    transport.banner_timeout = endpoint.connect_timeout
    transport.handshake_timeout = _STEP_TIMEOUT
    transport.auth_timeout = _STEP_TIMEOUT
    try:
        transport.start_client(timeout=endpoint.connect_timeout + _STEP_TIMEOUT)
        key = transport.get_remote_server_key()
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise _negotiation_failed(step, transport, error) from error
    _check_host_key(step, known_hosts, key, reached_directly=reached_directly)


def _known_first(offered: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Host key algorithms with those first for which known_hosts has the host's key.

    A host has several keys, and shows the one asked for first. Asking for another would make a
    known host look like an unknown one.
    """
    return tuple(sorted(offered, key=lambda algorithm: _key_type(algorithm) not in known))


def _key_type(algorithm: str) -> str:
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _negotiation_failed(step: _Step, transport: _Transport, error: BaseException) -> ConnectFailed:
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return step.failed(f"no algorithms in common: {error}")
    if transport.remote_version:
        return step.failed("the connection was closed, or stalled, during the key exchange")
    # paramiko raises its own exception for what it meets while it reads the banner.
    cause = error.__context__ if isinstance(error, paramiko.SSHException) else error
    if isinstance(cause, TimeoutError):
        return step.failed(
            f"accepted the connection, but sent no SSH banner within "
            f"{step.endpoint.connect_timeout:g} s",
            hint="Is it an SSH server, and is it overloaded?",
        )
    if isinstance(cause, EOFError | ConnectionResetError):
        return step.failed(
            "closed the connection before its SSH banner",
            hint="sshd does that beyond MaxStartups, and for addresses it is told to deny.",
        )
    return step.failed(f"does not speak SSH: {cause or error}")


def _check_host_key(
    step: _Step, known_hosts: KnownHosts, key: paramiko.PKey, *, reached_directly: bool
) -> None:
    endpoint = step.endpoint
    names = endpoint.recorded_names
    kind, blob = key.get_name(), key.asbytes()
    presented = f"{kind} {fingerprint(blob)}"
    standing, lines = known_hosts.judge(names, kind, blob)
    if standing is Standing.TRUSTED:
        return
    if standing is Standing.REVOKED:
        raise step.failed(
            f"THE HOST KEY IS REVOKED: {presented}, by {lines[0].origin}",
            hint="Whoever has that key is not to be trusted. Ask the host's administrator.",
        )
    add = _command_to_add(endpoint, key, reached_directly=reached_directly)
    compare = "Compare the fingerprint with `ssh-keygen -lf` on the host's console first."
    if standing is Standing.CHANGED:
        forget = [
            f"ssh-keygen -R {shlex.quote(names[0])} -f {shlex.quote(path)}"
            for path in dict.fromkeys(line.origin.rpartition(":")[0] for line in lines)
        ]
        raise step.failed(
            "THE HOST KEY HAS CHANGED. Someone may be intercepting the connection, "
            "or the host was installed anew.",
            hint=f"{compare} If the host is the right one:\n$ {' && '.join([*forget, add])}",
            details=[f"presented: {presented}", *map(_shown_known_key, lines)],
        )
    authority = (
        ["known_hosts trusts a certificate authority for it; host certificates are not supported"]
        if known_hosts.trusts_authority_for(names[0])
        else []
    )
    raise step.failed(
        f"unknown host key {presented}", hint=f"{compare} Then:\n$ {add}", details=authority
    )


def _shown_known_key(line: KnownKey) -> str:
    return f"recorded:  {line.key_type} {fingerprint(line.blob)} ({line.origin})"


def _command_to_add(endpoint: Endpoint, key: paramiko.PKey, *, reached_directly: bool) -> str:
    """The shell command that records the host's key in the first known_hosts file."""
    file = shlex.quote(str(endpoint.known_hosts[0]))
    name = endpoint.recorded_names[0]
    if reached_directly and not endpoint.host_key_alias:
        kind = key.get_name().removeprefix("ssh-").partition("-")[0]
        host = shlex.quote(endpoint.hostname)
        return f"ssh-keyscan -t {kind} -p {endpoint.port} {host} >> {file}"
    line = f"{name} {key.get_name()} {key.get_base64()}"
    return f"echo {shlex.quote(line)} >> {file}"


def _authenticate(step: _Step, transport: _Transport) -> None:
    user = step.endpoint.user
    with _agent() as agent_keys:
        identities = find_identities(step.endpoint, agent_keys)
        attempts: list[str] = []
        try:
            methods = _methods(transport, user)
            for identity in identities.usable:
                if transport.is_authenticated() or "publickey" not in methods:
                    break
                attempts.append(f"refused: {identity.label}")
                try:
                    more = transport.auth_publickey(user, identity.key)
                except paramiko.AuthenticationException:
                    if not transport.is_active():
                        raise
                    continue
                if more:
                    attempts[-1] = f"accepted, but {' and '.join(more)} is also asked for: " + (
                        identity.label
                    )
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _authentication_broke_off(step, attempts, error) from error
        if not transport.is_authenticated():
            raise _refused(step, methods, attempts, identities)


@contextlib.contextmanager
def _agent() -> Iterator[tuple[paramiko.AgentKey, ...]]:
    """The keys of the agent at SSH_AUTH_SOCK; none if there is no agent, or it is no use."""
    try:
        agent = paramiko.Agent()
    except (paramiko.SSHException, OSError):
        yield ()
        return
    try:
        yield agent.get_keys()
    finally:
        agent.close()


def _methods(transport: _Transport, user: str) -> list[str]:
    """The authentication methods that the server offers; some let a user in without any."""
    try:
        return list(transport.auth_none(user))
    except paramiko.BadAuthenticationType as refusal:
        return list(refusal.allowed_types)


def _authentication_broke_off(
    step: _Step, attempts: Sequence[str], error: BaseException
) -> ConnectFailed:
    return step.failed(
        f"the connection ended during authentication as {step.endpoint.user!r} "
        f"after {len(attempts)} keys: {error or type(error).__name__}",
        hint="sshd closes the connection after MaxAuthTries keys: name the right one with "
        "identity_file, and set IdentitiesOnly.",
        details=attempts,
    )


def _refused(
    step: _Step, methods: Sequence[str], attempts: Sequence[str], identities: Identities
) -> ConnectFailed:
    user = step.endpoint.user
    locked = [f"{path} is encrypted and no agent holds it" for path in identities.locked]
    details = [*attempts, *locked, *identities.unusable]
    offered = ", ".join(methods)
    if "publickey" not in methods:
        return step.failed(
            f"authentication refused for user {user!r}: the server takes {offered}, not publickey",
            hint="Allow keys on the host: mtppp answers no questions.",
            details=details,
        )
    if locked:
        return step.failed(
            f"authentication refused for user {user!r}: {locked[0]}",
            hint=f"ssh-add {shlex.quote(str(identities.locked[0]))}",
            details=details,
        )
    if not attempts:
        return step.failed(
            f"authentication refused for user {user!r}: there is no key to offer",
            hint="Name one with identity_file, or add one to the agent at SSH_AUTH_SOCK.",
            details=details,
        )
    return step.failed(
        f"authentication refused for user {user!r}: the server takes {offered}, "
        f"but none of the keys offered",
        hint=f"Is one of them in ~{user}/.ssh/authorized_keys there?",
        details=details,
    )
