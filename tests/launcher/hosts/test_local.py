"""Commands on this machine."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

import pytest
from sshd_server import has_ended

from mtppp.errors import HostTimeout
from mtppp.hosts.local import LocalTransport

MEGABYTE = 1 << 20


@pytest.fixture
def transport() -> LocalTransport:
    return LocalTransport("node-a")


def test_connecting_and_closing_are_harmless(transport: LocalTransport) -> None:
    transport.connect()
    transport.close()
    transport.close()
    assert transport.run(["echo", "on"], timeout=60).stdout == "on\n"


@pytest.mark.parametrize("argument", ["", "a b", "'\"\\", "$HOME;`id`|&", "*", "a\nb", "世界"])
def test_arguments_arrive_as_they_are(transport: LocalTransport, argument: str) -> None:
    assert transport.run(["printf", "<%s>", argument], timeout=60).stdout == f"<{argument}>"


@pytest.mark.parametrize("argv", [[], ["echo", "a\0b"]])
def test_what_is_no_command_line_is_refused(transport: LocalTransport, argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no command|NUL"):
        transport.run(argv, timeout=60)


@pytest.mark.parametrize("status", [0, 1, 77, 255])
def test_exit_status(transport: LocalTransport, status: int) -> None:
    assert transport.run(["sh", "-c", f"exit {status}"], timeout=60).status == status


def test_signal(transport: LocalTransport) -> None:
    assert transport.run(["sh", "-c", "kill -9 $$"], timeout=60).status == 137


def test_unknown_command(transport: LocalTransport) -> None:
    completed = transport.run(["no-such-command"], timeout=60)
    assert (completed.status, completed.stderr) == (127, "no-such-command: command not found\n")


def test_what_cannot_be_executed(transport: LocalTransport, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    completed = transport.run([str(plain)], timeout=60)
    assert (completed.status, completed.stderr) == (126, f"{plain}: Permission denied\n")


def test_outputs_are_apart_and_decoded(transport: LocalTransport) -> None:
    completed = transport.run(["sh", "-c", r"printf 'ü\377'; printf err >&2"], timeout=60)
    assert (completed.stdout, completed.stderr) == ("ü�", "err")


def test_eight_megabytes_both_ways(transport: LocalTransport) -> None:
    data = b"0123456789abcde\n" * (8 * MEGABYTE // 16)
    completed = transport.run(["tee", "/dev/stderr"], stdin=data, timeout=60)
    assert completed.stdout.encode() == completed.stderr.encode() == data


def test_input_that_nobody_reads(transport: LocalTransport) -> None:
    completed = transport.run(["echo", "done"], stdin=bytes(8 * MEGABYTE), timeout=60)
    assert (completed.status, completed.stdout) == (0, "done\n")


def test_environment_and_directory_are_those_of_a_login(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/operator")
    monkeypatch.setenv("HOME", str(tmp_path))
    completed = transport.run(["sh", "-c", "echo ${PYTHONPATH-unset} $HOME; pwd -P"], timeout=60)
    assert completed.stdout.splitlines() == [f"unset {tmp_path}", os.path.realpath(tmp_path)]


def test_home_is_the_accounts_where_the_operator_has_none(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    completed = transport.run(["sh", "-c", "echo $HOME"], timeout=60)
    assert completed.stdout.strip() == pwd.getpwuid(os.getuid()).pw_dir


def test_a_home_that_does_not_exist_is_no_obstacle(
    transport: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    completed = transport.run(["pwd", "-P"], timeout=60)
    assert (completed.status, completed.stdout) == (0, "/\n")


def test_timeout_kills_the_whole_group(transport: LocalTransport, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; echo so far; wait"
    started = time.monotonic()
    with pytest.raises(HostTimeout, match=r"node-a: `sh -c .* did not end within 0\.5 s") as caught:
        transport.run(["sh", "-c", script], timeout=0.5)
    assert time.monotonic() - started < 5
    assert caught.value.details == ("so far",)
    assert has_ended(int(pid.read_text()))


def test_timeout_is_kept_although_a_daemon_holds_the_outputs(
    transport: LocalTransport, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(HostTimeout):
        transport.run(["sh", "-c", f"setsid sleep 5 & echo $! > {pid}; exit"], timeout=0.5)
    assert time.monotonic() - started < 4
