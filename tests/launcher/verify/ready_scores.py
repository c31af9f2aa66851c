"""A server that has its scores ready and does nothing but send them: what is left is the client."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

PROMPT, ANSWER = 130, 32
"""Tokens of what is scored."""


def serve_scores(port: Connection) -> None:
    """Gives the same scores to everybody, as fast as it can; its port goes to `port`."""
    ids = list(range(PROMPT + ANSWER))
    position = {"9999": {"logprob": -0.3, "rank": 1, "decoded_token": "xyz"}}
    own = {"logprob": -2.5, "rank": 3, "decoded_token": "abc"}
    choice = {
        "token_ids": [5],
        "finish_reason": "length",
        "prompt_token_ids": ids,
        "prompt_logprobs": [None, *({str(token): own} | position for token in ids[1:])],
    }
    rest = json.dumps({"choices": [choice]})[1:].encode()
    answered = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            nonlocal answered
            self.rfile.read(int(self.headers["content-length"]))
            answered += 1
            body = f'{{"id": "{answered}", '.encode() + rest
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
