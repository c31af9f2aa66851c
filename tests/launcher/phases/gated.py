"""A server that answers as vLLM does, behind the gate itself: `gated.py PORT`."""

from __future__ import annotations

import asyncio
import json
import sys
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
    body = json.dumps(ANSWERS.get(scope["path"], {})).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


class Handler(BaseHTTPRequestHandler):
    """One request, as ASGI has it."""

    gate: Gate

    def do_GET(self) -> None:
        headers = [(n.lower().encode(), v.encode()) for n, v in self.headers.items()]
        scope = {"type": "http", "path": self.path, "headers": headers}
        asyncio.run(self.gate(scope, self._receive, self._send))

    def do_POST(self) -> None:
        self.do_GET()

    async def _receive(self) -> Any:
        return {"type": "http.request", "body": b""}

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
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
