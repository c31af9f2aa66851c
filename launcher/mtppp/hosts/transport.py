"""What a transport is: one way to run a command on one host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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

    def close(self) -> None:
        """Close the connection; harmless when it is closed."""
