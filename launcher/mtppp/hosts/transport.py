"""What a transport is: one way to run a command on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

HELD_BEAT = 10.0
"""Seconds between two signs of life for a command that stays."""
HELD_PATIENCE = 5.0
"""Seconds that a command that stayed has to end once it was released."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended.

    Attributes:
        status: exit status; 128 + N when signal N ended it.
        stdout, stderr: all that it wrote, decoded as UTF-8 with replacement characters.
    """

    status: int
    stdout: str
    stderr: str


class Held(Protocol):
    """A command that stays: it runs until its input ends, at the latest with this process.

    While it runs it is sent an empty line every few seconds, for it to know that we live.
    """

    @property
    def answer(self) -> str:
        """The line that was waited for."""

    def release(self, last: bytes) -> None:
        """Send a last input, end it, and give the command a few seconds to end."""


class Stream(Protocol):
    """A connection to a port, as far as a socket is one."""

    def recv(self, size: int, /) -> bytes:
        """At most `size` bytes; none when the other side has ended."""

    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Transport(Protocol):
    """Runs commands on one host. Safe to use from several threads at once."""

    @property
    def host(self) -> str:
        """The name by which cluster.yaml calls the host."""

    def connect(self) -> None:
        """Open the connection; harmless when it is open.

        Raises:
            ConnectFailed: unreachable, unknown host key, refused credentials; says which.
        """

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        """Run one command to its end.

        Args:
            argv: the command, quoted for the remote shell by the transport.
            stdin: written to the command's standard input, which is then closed.
            timeout: seconds until the command is given up.

        Raises:
            ConnectFailed: the connection is gone.
            HostTimeout: `timeout` passed first.
        """

    def hold(
        self, argv: Sequence[str], *, stdin: bytes, answer: bytes, timeout: float
    ) -> Held | Completed:
        """Start a command that stays, and wait for its answer.

        Args:
            answer: how the line begins that is waited for; what comes before is passed over.
            timeout: seconds until it must have come.

        Returns:
            Completed: it ended without an answer.

        Raises:
            ConnectFailed, HostTimeout: as `run` does.
        """

    def open_stream(self, address: str, port: int, *, timeout: float) -> Stream:
        """Connect to a port as the host itself reaches it.

        Raises:
            ForwardingProhibited: the host's sshd does not allow it.
            ConnectFailed: the connection is gone, or nothing listens there.
        """

    def close(self) -> None:
        """Close the connection; harmless when it is closed."""
