"""The transport to the machine that mtppp itself runs on."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from mtppp.errors import ConnectFailed, HostTimeout
from mtppp.hosts.command import check_argv, decoded, last_lines, shown
from mtppp.hosts.transport import HELD_BEAT, HELD_PATIENCE, Completed, Held

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class LocalTransport:
    """Runs commands on this machine as ssh would: no terminal, from the home directory.

    A command sees of this process's environment no more than `PATH`, `HOME` and the locale: what
    the operator happens to have exported must not decide how a node behaves.
    """

    def __init__(self, host: str) -> None:
        self._host = host

    @property
    def host(self) -> str:
        return self._host

    def connect(self) -> None:
        """There is nothing to connect to."""

    def close(self) -> None:
        """There is nothing to close."""

    def open_stream(self, address: str, port: int, *, timeout: float) -> socket.socket:
        """Connect to a port.

        Raises:
            ConnectFailed: nothing listens there.
        """
        try:
            stream = socket.create_connection((address, port), timeout)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectFailed(self._host, f"{address} port {port}: {reason}") from None
        stream.settimeout(None)
        return stream

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        """Run one command to its end.

        A command that cannot be started ends as it would under a shell: with 127 when there is
        no such command, with 126 when it cannot be executed, and the reason on its stderr.

        Raises:
            HostTimeout: `timeout` passed first; the command and all in its session are killed.
        """
        process = _started(argv)
        if isinstance(process, Completed):
            return process
        with process:
            try:
                stdout, stderr = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired as expired:
                raise HostTimeout(
                    self._host,
                    f"`{shown(argv)}` did not end within {timeout:g} s",
                    details=last_lines(expired.stderr or b"", expired.output or b""),
                ) from None
            finally:
                if process.returncode is None:
                    _kill_session(process)
        return Completed(_status(process.returncode), decoded(stdout), decoded(stderr))

    def hold(
        self, argv: Sequence[str], *, stdin: bytes, answer: bytes, timeout: float
    ) -> Held | Completed:
        """Start a command that stays, and wait for its answer; see Transport."""
        process = _started(argv)
        if isinstance(process, Completed):
            return process
        held = _Held(process)
        held.send(stdin)
        if not held.answers(answer, timeout):
            _kill_session(process)
            process.wait()
            raise HostTimeout(self._host, f"`{shown(argv)}` said nothing within {timeout:g} s")
        if held.answer:
            held.beat()
            return held
        stdout, stderr = process.communicate()
        return Completed(_status(process.returncode), decoded(stdout), decoded(stderr))


class _Held:
    """A command of this machine that stays; it ends with its input, which ends with us."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._released = threading.Event()
        self._line = b""

    @property
    def answer(self) -> str:
        return decoded(self._line)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: what it said tells why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def answers(self, beginning: bytes, timeout: float) -> bool:
        """Wait for an answer, or for the end of output; False when neither came in time."""
        reader = threading.Thread(target=self._read, args=(beginning,), daemon=True)
        reader.start()
        reader.join(timeout)
        return not reader.is_alive()

    def _read(self, beginning: bytes) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                self._line = line
                return

    def beat(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._released.wait(HELD_BEAT):
            self.send(b"\n")

    def release(self, last: bytes) -> None:
        self._released.set()
        self.send(last)
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(HELD_PATIENCE)
            except subprocess.TimeoutExpired:
                _kill_session(process)


def _started(argv: Sequence[str]) -> subprocess.Popen[bytes] | Completed:
    """The process of a command; Completed when it cannot be started."""
    check_argv(argv)
    environment = _environment(pwd.getpwuid(os.getuid()))
    home = environment["HOME"]
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # As sshd does for an account whose home directory does not exist.
            cwd=home if Path(home).is_dir() else "/",
            start_new_session=True,
        )
    except FileNotFoundError:
        return Completed(_NOT_FOUND, "", f"{argv[0]}: command not found\n")
    except OSError as error:
        return Completed(_NOT_EXECUTABLE, "", f"{argv[0]}: {error.strerror}\n")


def _environment(account: pwd.struct_passwd) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {
        **kept,
        # The operator's own, for whom `~` means this; in containers the account's often is not.
        "HOME": os.environ.get("HOME") or account.pw_dir,
        "LOGNAME": account.pw_name,
        "SHELL": account.pw_shell,
        "USER": account.pw_name,
    }


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, and close our ends of its pipes.

    Whatever left the group may still hold the other ends: reading them to their end could last.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
