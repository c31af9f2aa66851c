"""HTTP through a real sshd, to a port that listens on its side."""

from __future__ import annotations

import contextlib
import http.server
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from free_ports import free_port
from sshd_server import LOOPBACK, Relay, Sshd

from mtppp.engine.client import EngineClient, NotReachable
from mtppp.errors import ConnectFailed, ForwardingProhibited, MtpppError
from mtppp.hosts.forward import Forwarder, PrivateForwarder
from mtppp.hosts.local import LocalTransport
from mtppp.hosts.transport import Transport

MEGABYTES = 5 << 20


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes) -> None:
        # As a server that keeps no connection: it ends each just when the next request comes.
        self.close_connection = self.path == "/once"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer((LOOPBACK, 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def through(transport: Transport, port: int) -> Iterator[PrivateForwarder]:
    with contextlib.closing(
        PrivateForwarder(lambda: transport.open_stream(LOOPBACK, port, timeout=20))
    ) as forwarder:
        yield forwarder


def client(forwarder: PrivateForwarder) -> httpx.Client:
    return httpx.Client(
        base_url="http://10.9.8.7:8000",
        transport=httpx.HTTPTransport(uds=forwarder.path),
        trust_env=False,
        timeout=30,
    )


def test_bodies_arrive_whole_in_both_directions(sshd: Sshd, server_port: int) -> None:
    body = bytes(range(256)) * (MEGABYTES // 256)
    with (
        sshd.transport() as transport,
        through(transport, server_port) as forwarder,
        client(forwarder) as http_client,
    ):
        assert http_client.post("/", content=body).content == body


def test_connections_that_end_do_not_end_the_ssh_connection(sshd: Sshd, server_port: int) -> None:
    """sshd ends the whole connection over a message for a channel that it has closed."""
    with (
        sshd.transport() as transport,
        through(transport, server_port) as forwarder,
        client(forwarder) as http_client,
        ThreadPoolExecutor(8) as pool,
    ):
        transport.connect()
        connection = transport._connected()

        def ask(number: int) -> bool:
            content = b"x" * (number % 7) * 20_000
            with contextlib.suppress(httpx.TransportError):
                return http_client.post("/once", content=content).content == content
            return False

        assert any(pool.map(ask, range(200)))
        assert transport.run(["echo", "in"], timeout=20).stdout == "in\n"
        assert transport._connected() is connection


@pytest.mark.slow
def test_input_beyond_the_end_does_not_end_the_ssh_connection(sshd: Sshd) -> None:
    """A server that goes while it is sent to: sshd closes the channel in the middle of that."""
    with (
        sshd.transport() as transport,
        socket.create_server((LOOPBACK, 0)) as listener,
        ThreadPoolExecutor(8) as pool,
    ):
        transport.connect()
        connection = transport._connected()

        def leave(_: int) -> None:
            listener.accept()[0].close()

        def send(_: int) -> bool:
            stream = transport.open_stream(LOOPBACK, listener.getsockname()[1], timeout=20)
            with contextlib.closing(stream), contextlib.suppress(OSError):
                while True:
                    stream.sendall(b"x" * 100)
            return connection.is_open

        leaving = threading.Thread(target=lambda: list(map(leave, range(100))))
        leaving.start()
        assert all(pool.map(send, range(100)))
        leaving.join()


def test_port_where_nothing_listens(sshd: Sshd) -> None:
    port = free_port()
    with sshd.transport() as transport:
        with pytest.raises(ConnectFailed, match=f"{LOOPBACK} port {port}, from there"):
            transport.open_stream(LOOPBACK, port, timeout=20)
        with (
            through(transport, port) as forwarder,
            EngineClient("http://10.9.8.7:8000", forwarder=forwarder) as engine,
        ):
            assert not engine.healthy()
            with pytest.raises(NotReachable) as caught:
                engine.models()
    expected = f"http://10.9.8.7:8000/v1/models: {LOOPBACK}: {LOOPBACK} port {port}, from there"
    assert caught.value.message.startswith(expected)


def test_forwarding_that_sshd_prohibits(start_sshd: Callable[..., Sshd], server_port: int) -> None:
    server = start_sshd("AllowTcpForwarding no")
    with server.transport() as transport, pytest.raises(ForwardingProhibited) as caught:
        transport.open_stream(LOOPBACK, server_port, timeout=20)
    assert "AllowTcpForwarding" in caught.value.hint


@pytest.mark.slow
def test_slow_link(sshd: Sshd, server_port: int) -> None:
    relay = Relay(sshd.port)
    try:
        known_hosts = sshd.directory / "known_hosts_relay"
        known_hosts.write_text(sshd.known_line(name=f"[{LOOPBACK}]:{relay.port}"))
        with (
            sshd.transport(port=relay.port, known_hosts=known_hosts) as transport,
            through(transport, server_port) as forwarder,
            EngineClient("http://10.9.8.7:8000", forwarder=forwarder) as engine,
        ):
            transport.connect()
            # Each way. /health asks once through a connection that has to be opened first.
            relay.delay = 1.5
            assert engine.healthy()
    finally:
        relay.stop()


def test_another_user_cannot_connect(sshd: Sshd, server_port: int) -> None:
    with sshd.transport() as transport, through(transport, server_port) as forwarder:
        directory = Path(forwarder.path).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


def test_socket_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(MtpppError) as caught:
        PrivateForwarder(lambda: LocalTransport("a").open_stream(LOOPBACK, 1, timeout=1))
    assert "TMPDIR" in caught.value.hint
    assert not list(long.iterdir())


def test_failures_are_told(server_port: int) -> None:
    told: list[str] = []
    listener = socket.create_server((LOOPBACK, 0))
    nowhere = free_port()
    forwarder = Forwarder(
        listener,
        lambda: LocalTransport("a").open_stream(LOOPBACK, nowhere, timeout=5),
        on_failure=lambda error: told.append(error.message),
    )
    with socket.create_connection(listener.getsockname()) as near:
        assert near.recv(1) == b""
    forwarder.close()
    assert told == [f"a: {LOOPBACK} port {nowhere}: Connection refused"]
    assert forwarder.problem == told[0]
