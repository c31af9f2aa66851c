"""A server whose model is a little arithmetic, so that whole tiers can be run in minutes.

What comes after two tokens is drawn by a checksum of them and of the prompt's first ones: eight
likely tokens, and how likely they are. Two servers of it differ as two layouts do: tokens that
nearly tie may change places. Now and then each emits a token that it would not when scored, as
rounding makes happen: so the tail of the null is above 1 nat, which only a large tier can know.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Sequence
from itertools import accumulate, count
from multiprocessing.connection import Connection
from typing import Any

from quick_http import serve_quickly

MODEL = "arithmetic"
CONTEXT = 9216
VOCABULARY = 4096

_TOLD_BY = 4
"""Tokens by which prompts differ; no prompt is shorter."""
_REST = 0.005
"""Probability of all that are none of the eight, together."""
_SURE = (0.8, 0.1, 0.04, 0.02, 0.015, 0.01, 0.005, 0.005)
_TIED = (0.42, 0.415, 0.08, 0.03, 0.02, 0.015, 0.01, 0.005)
_UNSURE = (0.65, 0.19, 0.08, 0.03, 0.02, 0.015, 0.005, 0.005)
_SHAPES = (_SURE,) * 12 + (_UNSURE,) * 3 + (_TIED,)
_WAVERS = 0.001
"""How often the second best comes where it is 1.23 nats behind: 2 tokens in 10,000 of all."""

Likely = tuple[tuple[int, ...], tuple[float, ...]]
"""Eight tokens, the best first, and their probabilities."""


def likely(whole: Sequence[int], position: int) -> Likely:
    """What comes at a position, after two tokens."""
    drawn = zlib.crc32(repr((*whole[:_TOLD_BY], *whole[position - 2 : position])).encode())
    first, step = drawn % VOCABULARY, 1 + drawn // VOCABULARY % 400
    tokens = tuple((first + i * step) % VOCABULARY for i in range(len(_SURE)))
    return tokens, _SHAPES[drawn >> 28]


def generated(
    ids: Sequence[int], most: int, temperature: float, damaged: float, chance: random.Random
) -> list[int]:
    """Go on with a prompt; so many of the tokens are any others."""
    whole = list(ids)
    for _ in range(most):
        tokens, shape = likely(whole, len(whole))
        if damaged and chance.random() < damaged:
            whole.append(chance.randrange(VOCABULARY))
        elif temperature:
            place = chance.random()
            index = sum(place >= end for end in accumulate(shape))
            whole.append(tokens[index] if index < len(tokens) else _other(tokens, chance))
        else:
            second = chance.random()
            wavers = (shape is _TIED and second < 0.5) or (shape is _UNSURE and second < _WAVERS)
            whole.append(tokens[1 if wavers else 0])
    return whole[len(ids) :]


def _other(tokens: Sequence[int], chance: random.Random) -> int:
    while (drawn := chance.randrange(VOCABULARY)) in tokens:
        pass
    return drawn


def scored(ids: Sequence[int], wanted: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: the token itself and so many of the likeliest at each position."""
    positions: list[dict[str, Any] | None] = [None, {str(ids[1]): {"logprob": -0.1, "rank": 1}}]
    for i in range(2, len(ids)):
        tokens, shape = likely(ids, i)
        position = {
            str(token): {"logprob": math.log(p), "rank": rank}
            for rank, (token, p) in enumerate(zip(tokens[:wanted], shape, strict=False), 1)
        }
        if ids[i] not in tokens:
            other = math.log(_REST / (VOCABULARY - len(tokens)))
            position[str(ids[i])] = {"logprob": other, "rank": 100}
        elif ids[i] not in tokens[:wanted]:
            rank = tokens.index(ids[i])
            position[str(ids[i])] = {"logprob": math.log(shape[rank]), "rank": rank + 1}
        positions.append(position)
    return positions


def serve(port: Connection, seed: int, damaged: float) -> None:
    """Serve for ever; the port goes to `port`."""
    chance = random.Random(seed)
    names = count(1)

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": MODEL, "root": f"/{MODEL}", "max_model_len": CONTEXT}]}
        if path == "/tokenize":
            text = str(body.get("prompt") or body["messages"])
            return {
                "tokens": [
                    zlib.crc32(text[i : i + 6].encode()) % VOCABULARY
                    for i in range(0, len(text), 6)
                ]
            }
        if path == "/detokenize":
            return {"prompt": " ".join(map(str, body["tokens"]))}
        ids = body["prompt"]
        choice: dict[str, Any] = {"finish_reason": "length", "prompt_token_ids": ids}
        if wanted := body.get("prompt_logprobs"):
            choice |= {"token_ids": [0], "prompt_logprobs": scored(ids, wanted)}
        else:
            asked = body["max_tokens"], body["temperature"]
            choice["token_ids"] = generated(ids, *asked, damaged, chance)
        return {"id": str(next(names)), "choices": [choice]}

    def respond(path: str, asked: bytes) -> bytes | None:
        if not asked and path != "/v1/models":
            return None
        return json.dumps(answer(path, json.loads(asked or b"{}"))).encode()

    serve_quickly(respond, port)
