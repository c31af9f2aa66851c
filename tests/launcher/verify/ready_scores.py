"""A server that has its scores ready and does nothing but send them: what is left is the client."""

from __future__ import annotations

import json
from itertools import count
from multiprocessing.connection import Connection

from quick_http import serve_quickly

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
    numbers = count(1)
    serve_quickly(lambda path, asked: f'{{"id": "{next(numbers)}", '.encode() + rest, port)
