"""The client keeps a fast server busy: what it costs in processor time, whatever else runs."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

import pytest

from mtppp.engine.bulk import BulkClient, Scores, for_each

PROMPT, ANSWER = 130, 32
REQUESTS = 150
FEWEST = 2000  # scored tokens for each second of one core


def _serve(port: Connection) -> None:
    """Gives the same scores to everybody, as fast as it can."""
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


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server in a process of its own, so that only the client's time is counted."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    process.kill()
    process.join()


def test_scoring_costs_little(url: str) -> None:
    scored = 0

    def count(_: int, scores: Scores) -> None:
        nonlocal scored
        scored += len(scores.gap)

    async def score() -> float:
        async with BulkClient(url, role="baseline") as client:
            ids = list(range(PROMPT + ANSWER))
            began = time.process_time()
            await for_each(range(REQUESTS), lambda _: client.score("demo", ids, PROMPT), count, 16)
            return time.process_time() - began

    seconds = asyncio.run(score())
    assert scored == REQUESTS * ANSWER
    assert scored / seconds > FEWEST
