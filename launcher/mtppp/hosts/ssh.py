"""The transport to a host that is reached by ssh."""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import paramiko

from mtppp.errors import ConnectFailed, ForwardingProhibited, HostTimeout
from mtppp.hosts.command import check_argv, decoded, last_lines, shown
from mtppp.hosts.ssh_config import SshTarget, resolve_route
from mtppp.hosts.ssh_connection import PROHIBITED, Connection, Forward, Liveness, Session
from mtppp.hosts.transport import HELD_PATIENCE, Completed, Held

__all__ = ["Liveness", "SshTarget", "SshTransport"]

_READ_BYTES = 1 << 16
_REFUSED_PAUSE = 0.2
_LOSS_PAUSE = 1.0
_LOST = (paramiko.SSHException, EOFError, OSError)


class SshTransport:
    """Runs commands over one SSH connection, each on a channel of its own.

    The connection is opened when it is first needed. Once lost it is opened again only by the
    next call: a command that was running may have had its effect, so none is ever repeated.
    """

    def __init__(self, target: SshTarget, *, liveness: Liveness | None = None) -> None:
        self._target = target
        self._liveness = liveness or Liveness()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    @property
    def host(self) -> str:
        return self._target.host

    def connect(self) -> None:
        """Open the connection; harmless when it is open.

        Raises:
            ConnectFailed: unreachable, unknown host key, refused credentials; says which.
        """
        self._connected()

    def close(self) -> None:
        """Close the connection, and with it the commands that are running."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        """Run one command to its end: until it has ended and its outputs are closed.

        Args:
            timeout: seconds, from when the connection is open. A command that is given up loses
                its input and outputs but is not killed: sshd leaves it to run.

        Raises:
            ConnectFailed: the connection cannot be opened, or was lost while the command ran.
            HostTimeout: `timeout` passed first.
        """
        check_argv(argv)
        connection = self._connected()
        deadline = time.monotonic() + timeout
        session = self._open_session(connection, stdin, deadline)
        outputs = _Outputs(session.channel)
        cause: BaseException | None = None
        status = -1
        with _Deadline(session, deadline) as expired:
            try:
                session.start(shlex.join(argv).encode("utf-8", "surrogateescape"))
                outputs.collect()
                status = session.channel.recv_exit_status()
            except _LOST as error:
                cause = error
        if expired.is_set():
            raise HostTimeout(
                self.host,
                f"`{shown(argv)}` did not end within {timeout:g} s",
                details=last_lines(outputs.stderr, outputs.stdout),
            )
        if status < 0:
            status = _signal_status(session.exit_signal)
        if status < 0:
            raise self._lost(connection, argv, cause)
        return Completed(status, decoded(outputs.stdout), decoded(outputs.stderr))

    def hold(
        self, argv: Sequence[str], *, stdin: bytes, answer: bytes, timeout: float
    ) -> Held | Completed:
        """Start a command that stays, and wait for its answer; see Transport."""
        check_argv(argv)
        connection = self._connected()
        deadline = time.monotonic() + timeout
        session = self._open_session(connection, stdin, deadline, stays=True)
        held = _Held(connection, session)
        cause: BaseException | None = None
        with (watch := _Deadline(session, deadline)) as expired:
            try:
                session.start(shlex.join(argv).encode("utf-8", "surrogateescape"))
                held.wait_for(answer)
            except _LOST as error:
                cause = error
            if held.answer and not expired.is_set():
                watch.spare()
                return held
            outputs = _Outputs(session.channel)
            outputs.collect()
            status = -1 if cause else session.channel.recv_exit_status()
        if expired.is_set():
            raise HostTimeout(self.host, f"`{shown(argv)}` said nothing within {timeout:g} s")
        if status < 0:
            raise self._lost(connection, argv, cause)
        return Completed(status, decoded(outputs.stdout), decoded(outputs.stderr))

    def open_stream(self, address: str, port: int, *, timeout: float) -> Forward:
        """Connect to a port as the host itself reaches it, through the SSH connection.

        Raises:
            ForwardingProhibited: the host's sshd does not allow it.
            ConnectFailed: the SSH connection cannot be opened or was lost, or nothing listens.
        """
        connection = self._connected()
        try:
            return connection.open_forward(address, port, timeout)
        except paramiko.ChannelException as error:
            if error.code == PROHIBITED:
                raise ForwardingProhibited(
                    self.host,
                    "its sshd does not carry connections to a port",
                    hint="Set `AllowTcpForwarding local` in its sshd_config.",
                ) from None
            reason = f"{address} port {port}, from there: {error.text}"
            raise ConnectFailed(self.host, reason) from None
        except _LOST as error:
            reason = f"no connection to {address} port {port} from there: {_reason(error)}"
            raise ConnectFailed(self.host, reason) from error

    def _connected(self) -> Connection:
        with self._lock:
            if self._connection is not None and self._connection.is_open:
                return self._connection
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._connection = Connection(self.host, resolve_route(self._target), self._liveness)
            return self._connection

    def _open_session(
        self, connection: Connection, stdin: bytes, deadline: float, *, stays: bool = False
    ) -> Session:
        """A session for one command, waiting for one while the server has none to give.

        sshd allows MaxSessions (10) at once, and one that has just ended may still count.
        """
        while True:
            left = deadline - time.monotonic()
            try:
                return connection.open_session(stdin, timeout=max(left, 0), stays=stays)
            except _LOST as error:
                if not connection.is_open:
                    raise ConnectFailed(
                        self.host, f"the connection was lost: {_reason(error)}"
                    ) from error
                if left <= _REFUSED_PAUSE:
                    raise HostTimeout(
                        self.host,
                        f"the server opened no session in time: {_reason(error)}",
                        hint="See MaxSessions in its sshd_config.",
                    ) from error
            time.sleep(_REFUSED_PAUSE)

    def _lost(
        self, connection: Connection, argv: Sequence[str], cause: BaseException | None
    ) -> ConnectFailed:
        # A channel is closed a moment before the connection that is lost.
        connection.transport.join(_LOSS_PAUSE)
        if connection.is_open:
            return ConnectFailed(
                self.host, f"the server closed the session of `{shown(argv)}` without a status"
            )
        reason = _reason(cause or connection.transport.get_exception())
        return ConnectFailed(
            self.host,
            f"the connection was lost while `{shown(argv)}` ran: {reason}",
            hint="What the command did by then is not known.",
        )


class _Outputs:
    """Gathers both outputs of a command at once: neither waits for the other."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []

    @property
    def stdout(self) -> bytes:
        return b"".join(self._stdout)

    @property
    def stderr(self) -> bytes:
        return b"".join(self._stderr)

    def collect(self) -> None:
        """Return once both outputs have ended, be it that the channel was closed."""
        reader = threading.Thread(
            target=self._read, args=(self._channel.recv_stderr, self._stderr), daemon=True
        )
        reader.start()
        self._read(self._channel.recv, self._stdout)
        reader.join()

    def _read(self, receive: Callable[[int], bytes], chunks: list[bytes]) -> None:
        with contextlib.suppress(*_LOST):
            chunks.extend(iter(functools.partial(receive, _READ_BYTES), b""))


class _Held:
    """A command that stays, on a channel of its own."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self._connection = connection
        self._session = session
        self._line = b""

    @property
    def answer(self) -> str:
        return decoded(self._line)

    def wait_for(self, beginning: bytes) -> None:
        """Read up to the line that begins so, or to the end of the output."""
        with self._session.channel.makefile("rb", 0) as output:
            for line in iter(output.readline, b""):
                if line.startswith(beginning):
                    self._line = line
                    return

    def release(self, last: bytes) -> None:
        self._session.finish(last)
        # The connection's thread sends it with the next answer from there; in a dead network none
        # comes, which is not waited for.
        threading.Thread(target=self._connection.ask_for_a_sign_of_life, daemon=True).start()
        self._session.channel.status_event.wait(HELD_PATIENCE)
        self._session.close()


class _Deadline:
    """Closes a session at a point in time, which ends every wait for it, and at the end."""

    def __init__(self, session: Session, deadline: float) -> None:
        self._session = session
        self._spared = False
        self._expired = threading.Event()
        self._timer = threading.Timer(max(deadline - time.monotonic(), 0), self._expire)
        self._timer.daemon = True

    def __enter__(self) -> threading.Event:
        self._timer.start()
        return self._expired

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._spared:
            self._session.close()

    def spare(self) -> None:
        """Leave the session open at the end."""
        self._spared = True

    def _expire(self) -> None:
        self._expired.set()
        self._session.close()
        # A channel that was closed between paramiko's check for that and its wait for the answer
        # to a request would be waited for without end.
        self._session.channel.event.set()


def _signal_status(name: str | None) -> int:
    """The status for the signal that ended a command; -1 if none did.

    sshd has no name for some, SIGBUS for one: those give 255.
    """
    if name is None:
        return -1
    try:
        return 128 + signal.Signals[f"SIG{name}"]
    except KeyError:
        return 255


def _reason(error: BaseException | None) -> str:
    if error is None or isinstance(error, EOFError):
        return "the other side closed it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
