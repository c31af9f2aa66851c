"""A server that answers as vLLM does, behind the gate itself: `gated.py PORT [URL]`.

What it answers comes from the server at the URL, if one is given.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mtppp_patches.gate import Gate

ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "demo"}]},
    "/v1/completions": {
        "choices": [{"text": "a", "finish_reason": "length"}],
        "usage": {"completion_tokens": 1},
    },
}


async def answers(scope: Any, receive: Any, send: Any) -> None:
    status, body = 200, json.dumps(ANSWERS.get(scope["path"], {})).encode()
    if Handler.upstream:
        status, body = passed_on(scope["path"], (await receive())["body"])
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def passed_on(path: str, body: bytes) -> tuple[int, bytes]:
    """What the other server answers."""
    try:
        with Handler.opener.open(Handler.upstream + path, body or None, timeout=60) as answer:
            return 200, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()


class Handler(BaseHTTPRequestHandler):
    """One request, as ASGI has it."""

    gate: Gate
    upstream = ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def do_GET(self) -> None:
        headers = [(n.lower().encode(), v.encode()) for n, v in self.headers.items()]
        scope = {"type": "http", "path": self.path, "headers": headers}
        asyncio.run(self.gate(scope, self._receive, self._send))

    def do_POST(self) -> None:
        self.do_GET()

    async def _receive(self) -> Any:
        length = int(self.headers.get("content-length") or 0)
        return {"type": "http.request", "body": self.rfile.read(length)}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.wfile.write(message["body"])
            return
        self.send_response(message["status"])
        for name, value in message["headers"]:
            self.send_header(name.decode(), value.decode())
        self.end_headers()


if __name__ == "__main__":
    Handler.gate = Gate(answers)
    Handler.upstream = "".join(sys.argv[2:])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
