"""Carries connections made on this machine to a port that may be reached from a node only."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from mtppp.errors import MtpppError
from mtppp.hosts.transport import Stream

_CHUNK = 1 << 16
_BACKLOG = 128


class Forwarder:
    """Accepts connections and carries each to where `connect` leads, until it is closed.

    A connection that leads nowhere is closed without a word.

    Args:
        listener: listens already; closed with the forwarder.
        connect: raises MtpppError when there is no way on.
        on_failure: told why, in a thread of its own.

    Attributes:
        problem: why the latest connection led nowhere; "" when it did not.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], Stream],
        *,
        on_failure: Callable[[MtpppError], None] = lambda _: None,
    ) -> None:
        self._listener = listener
        self._connect = connect
        self._on_failure = on_failure
        self.problem = ""
        threading.Thread(target=self._accept, name="forwarder", daemon=True).start()

    def close(self) -> None:
        """Accept no more. Connections that are open end with the transport they go through."""
        # Closing alone would leave the thread in its wait.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with contextlib.closing(near):
            try:
                far = self._connect()
            except MtpppError as error:
                self.problem = error.message
                self._on_failure(error)
                return
            self.problem = ""
            with contextlib.closing(far):
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join()


class PrivateForwarder(Forwarder):
    """A forwarder behind a Unix socket that no other user of this machine can connect to.

    Attributes:
        path: of the socket.

    Raises:
        MtpppError: there is no place for the socket.
    """

    def __init__(self, connect: Callable[[], Stream]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mtppp-")
        self.path = str(Path(self._directory.name) / "http")
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self.path)
        except OSError as error:
            listener.close()
            self._directory.cleanup()
            raise MtpppError(
                f"cannot listen at {self.path}: {error}",
                hint="set TMPDIR to a directory with a short path: a socket's ends at 107 bytes",
            ) from None
        listener.listen(_BACKLOG)
        super().__init__(listener, connect)

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


def _copy(source: Stream, sink: Stream) -> None:
    """Copy until `source` ends, and tell `sink` so. A side that is lost ends the other, too."""
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    except (OSError, EOFError):
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RD)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
