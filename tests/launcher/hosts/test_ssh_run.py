"""Commands over ssh: what they are given, what they return, and how they fail."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sshd_server import Relay, Sshd, has_ended, relay_command

from mtppp.errors import ConnectFailed, HostTimeout
from mtppp.hosts.ssh import Liveness, SshTransport

MEGABYTE = 1 << 20
LONG = 60.0  # for what must end by itself, on however busy a machine


@pytest.fixture(scope="module")
def transport(sshd: Sshd) -> Iterator[SshTransport]:
    with sshd.transport() as transport:
        transport.connect()
        yield transport


@pytest.mark.parametrize(
    "argument",
    [
        "",
        " ",
        "a b",
        "'",
        '"',
        "\\",
        "$HOME ${HOME} $(id) `id`",
        "a;b&c|d<e>f",
        "*?[a]{b,c}~!#%^()",
        "line\nline\ttab\r",
        "-n",
        "Grüße, 世界 🚀",
        "\udcff",  # a byte that is no UTF-8
    ],
)
def test_arguments_arrive_as_they_are(transport: SshTransport, argument: str) -> None:
    script = 'printf %s "$1" | od -An -v -tx1'
    completed = transport.run(["sh", "-c", script, "sh", argument], timeout=LONG)
    arrived = bytes.fromhex(completed.stdout)
    assert arrived == argument.encode("utf-8", "surrogateescape")


def test_empty_arguments_count(transport: SshTransport) -> None:
    completed = transport.run(["printf", "<%s>", "", "a", ""], timeout=LONG)
    assert completed.stdout == "<><a><>"


@pytest.mark.parametrize("argv", [[], ["echo", "a\0b"]])
def test_what_is_no_command_line_is_refused(transport: SshTransport, argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no command|NUL"):
        transport.run(argv, timeout=LONG)


@pytest.mark.parametrize("status", [0, 1, 2, 77, 126, 255])
def test_exit_status(transport: SshTransport, status: int) -> None:
    completed = transport.run(["sh", "-c", f"exit {status}"], timeout=LONG)
    assert completed.status == status


@pytest.mark.parametrize(
    ("name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("USR1", 10)]
)
def test_signal(transport: SshTransport, name: str, number: int) -> None:
    completed = transport.run(["sh", "-c", f"echo before; kill -{name} $$"], timeout=LONG)
    assert (completed.status, completed.stdout) == (128 + number, "before\n")


def test_unknown_command(transport: SshTransport) -> None:
    completed = transport.run(["no-such-command"], timeout=LONG)
    assert completed.status == 127
    assert "no-such-command" in completed.stderr


def test_outputs_are_apart_and_decoded(transport: SshTransport) -> None:
    completed = transport.run(["sh", "-c", r"printf 'ü\377'; printf err >&2"], timeout=LONG)
    assert (completed.stdout, completed.stderr) == ("ü�", "err")


def test_input_is_closed_when_there_is_none(transport: SshTransport) -> None:
    completed = transport.run(["cat"], timeout=LONG)
    assert (completed.status, completed.stdout) == (0, "")


def test_eight_megabytes_both_ways(transport: SshTransport) -> None:
    data = b"0123456789abcde\n" * (8 * MEGABYTE // 16)
    completed = transport.run(["tee", "/dev/stderr"], stdin=data, timeout=LONG)
    assert completed.status == 0
    digest = hashlib.sha256(data).digest()
    assert hashlib.sha256(completed.stdout.encode()).digest() == digest
    assert hashlib.sha256(completed.stderr.encode()).digest() == digest


def test_input_that_nobody_reads(transport: SshTransport) -> None:
    completed = transport.run(["echo", "done"], stdin=bytes(8 * MEGABYTE), timeout=LONG)
    assert (completed.status, completed.stdout) == (0, "done\n")


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, MEGABYTE // 2])
def test_commands_that_end_early_leave_the_connection_alone(sshd: Sshd, size: int) -> None:
    """What is still sent to a command that has ended makes sshd end the whole connection."""
    with sshd.transport() as transport, ThreadPoolExecutor(4) as pool:
        connection = transport.run(["sh", "-c", "echo $PPID"], timeout=LONG).stdout
        runs = [
            pool.submit(transport.run, ["true"], stdin=bytes(size), timeout=LONG)
            for _ in range(200)
        ]
        assert {run.result().status for run in runs} == {0}
        assert transport.run(["sh", "-c", "echo $PPID"], timeout=LONG).stdout == connection


def test_timeout_gives_the_command_up_and_keeps_the_connection(transport: SshTransport) -> None:
    started = time.monotonic()
    with pytest.raises(HostTimeout, match=r"did not end within 1\.5 s") as caught:
        transport.run(["sh", "-c", "echo so far; exec sleep 20"], timeout=1.5)
    assert time.monotonic() - started < 5
    assert caught.value.host == transport.host
    assert caught.value.details == ("so far",)
    assert transport.run(["echo", "on"], timeout=LONG).stdout == "on\n"


def test_timeout_while_input_is_not_read(transport: SshTransport) -> None:
    with pytest.raises(HostTimeout):
        transport.run(["sleep", "3"], stdin=bytes(8 * MEGABYTE), timeout=0.3)


def test_timeout_closes_the_commands_outputs(transport: SshTransport, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}; while sleep 0.05; do echo on; done"
    with pytest.raises(HostTimeout):
        transport.run(["sh", "-c", script], timeout=1)
    assert has_ended(int(pid.read_text()))


def test_nothing_of_the_environment_is_passed_on(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_MTPPP_LEAK", "leaked")
    with sshd.transport() as transport:
        assert "leaked" not in transport.run(["env"], timeout=LONG).stdout


def test_commands_share_a_connection(transport: SshTransport) -> None:
    barrier = ["sh", "-c", 'read line; echo "$line"; echo "$SSH_CONNECTION"']
    with ThreadPoolExecutor(8) as pool:
        runs = [
            pool.submit(transport.run, barrier, stdin=f"{n}\n".encode(), timeout=LONG)
            for n in range(24)
        ]
        outputs = [run.result().stdout.splitlines() for run in runs]
    assert [first for first, _ in outputs] == [str(n) for n in range(24)]
    assert len({connection for _, connection in outputs}) == 1


def test_more_commands_than_sessions_wait_for_one(start_sshd: Callable[..., Sshd]) -> None:
    with start_sshd("MaxSessions 2").transport() as transport, ThreadPoolExecutor(6) as pool:
        runs = [
            pool.submit(transport.run, ["sh", "-c", f"sleep 0.1; echo {n}"], timeout=LONG)
            for n in range(6)
        ]
        assert [run.result().stdout for run in runs] == [f"{n}\n" for n in range(6)]


def test_no_session_at_all(start_sshd: Callable[..., Sshd]) -> None:
    with start_sshd("MaxSessions 0").transport() as transport:
        with pytest.raises(HostTimeout, match="opened no session in time") as caught:
            transport.run(["true"], timeout=0.5)
        assert "MaxSessions" in caught.value.hint


def test_threads_share_one_first_connection(sshd: Sshd) -> None:
    with sshd.transport() as transport, ThreadPoolExecutor(8) as pool:
        command = ["sh", "-c", "echo $SSH_CONNECTION"]
        runs = [pool.submit(transport.run, command, timeout=LONG) for _ in range(8)]
        assert len({run.result().stdout for run in runs}) == 1


def test_sixty_four_hosts_at_once(sshd: Sshd) -> None:
    def visit(number: int) -> str:
        with sshd.transport() as transport:
            return transport.run(["echo", str(number)], timeout=LONG).stdout

    with ThreadPoolExecutor(64) as pool:
        outputs = list(pool.map(visit, range(64)))
    assert outputs == [f"{number}\n" for number in range(64)]


def test_server_dies_while_a_command_runs(sshd: Sshd) -> None:
    with sshd.transport() as transport:
        with pytest.raises(ConnectFailed, match="connection was lost while `sh -c") as caught:
            transport.run(["sh", "-c", "kill -9 $PPID; sleep 1"], timeout=LONG)
        assert caught.value.host == transport.host
        assert transport.run(["echo", "again"], timeout=LONG).stdout == "again\n"


def test_a_lost_command_is_not_repeated(sshd: Sshd) -> None:
    counter = sshd.directory / "runs"
    with sshd.transport() as transport:
        with pytest.raises(ConnectFailed):
            transport.run(["sh", "-c", f"echo run >> {counter}; kill -9 $PPID"], timeout=LONG)
        transport.run(["true"], timeout=LONG)
    assert counter.read_text() == "run\n"


def test_close_ends_what_runs_and_is_harmless_twice(sshd: Sshd) -> None:
    with sshd.transport() as transport, ThreadPoolExecutor(1) as pool:
        transport.connect()
        run = pool.submit(transport.run, ["sh", "-c", "sleep 20"], timeout=LONG)
        threading.Timer(0.3, transport.close).start()
        with pytest.raises(ConnectFailed):
            run.result(5)
        transport.close()
        assert transport.run(["echo", "anew"], timeout=LONG).stdout == "anew\n"


@contextlib.contextmanager
def through(relay: Relay, sshd: Sshd, liveness: Liveness) -> Iterator[SshTransport]:
    known_hosts = sshd.directory / f"known_hosts.{relay.port}"
    known_hosts.write_text(sshd.known_line(name=f"[127.0.0.1]:{relay.port}"))
    target = sshd.target(port=relay.port, known_hosts=known_hosts)
    with contextlib.closing(SshTransport(target, liveness=liveness)) as transport:
        yield transport
    relay.stop()


def test_a_cut_network_is_noticed(sshd: Sshd) -> None:
    relay = Relay(sshd.port)
    with through(relay, sshd, Liveness(interval=0.1, patience=0.6)) as transport:
        transport.connect()
        threading.Timer(0.3, setattr, (relay, "cut", True)).start()
        started = time.monotonic()
        with pytest.raises(ConnectFailed, match="nothing heard for"):
            transport.run(["sleep", "20"], timeout=LONG)
        assert 0.3 < time.monotonic() - started < 10, "not before it was cut"


def test_a_cut_network_is_noticed_while_sending(sshd: Sshd) -> None:
    relay = Relay(sshd.port, rate=2 * MEGABYTE)
    with through(relay, sshd, Liveness(interval=0.1, patience=1)) as transport:
        transport.connect()
        threading.Timer(0.5, setattr, (relay, "cut", True)).start()
        with pytest.raises(ConnectFailed, match=r"connection was lost while .*: nothing heard for"):
            transport.run(["cat"], stdin=bytes(32 * MEGABYTE), timeout=LONG)


@pytest.mark.slow
def test_a_network_busy_with_input_is_not_a_dead_one(sshd: Sshd, tmp_path: Path) -> None:
    """While input waits for a slow network, nothing is read, so nothing can be heard."""
    config = tmp_path / "config"
    relay = relay_command(tmp_path, rate=MEGABYTE // 4)
    config.write_text(f"Host *\n ProxyCommand {relay} %h %p\n")
    target = sshd.target(config_file=config)
    liveness = Liveness(interval=0.1, patience=1.5)
    with contextlib.closing(SshTransport(target, liveness=liveness)) as transport:
        started = time.monotonic()
        transport.run(["sleep", "3"], stdin=bytes(MEGABYTE * 3 // 4), timeout=LONG)
        assert time.monotonic() - started > 2.5


@pytest.mark.slow
def test_a_slow_network_is_not_a_dead_one(sshd: Sshd) -> None:
    relay = Relay(sshd.port)
    with through(relay, sshd, Liveness(interval=0.05, patience=1.2)) as transport:
        transport.connect()
        relay.delay = 0.2
        completed = transport.run(["sh", "-c", "sleep 1.5; echo slow"], timeout=LONG)
        assert completed.stdout == "slow\n"


def test_a_silent_command_on_a_living_connection_is_left_alone(sshd: Sshd) -> None:
    with contextlib.closing(
        SshTransport(sshd.target(), liveness=Liveness(interval=0.1, patience=1))
    ) as transport:
        assert transport.run(["sleep", "1.6"], timeout=LONG).status == 0
