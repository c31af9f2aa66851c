"""A server for HTTP that does as little as it can beside what it answers."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection


def serve_quickly(answer: Callable[[str, bytes], bytes | None], port: Connection) -> None:
    """Answer for ever; the port goes to `port`.

    Args:
        answer: of a path and the body that came, empty for GET; None for 404.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._give(b"")

        def do_POST(self) -> None:
            self._give(self.rfile.read(int(self.headers["content-length"])))

        def _give(self, asked: bytes) -> None:
            body = answer(self.path, asked)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    port.send(http.server_port)
    http.serve_forever()
