"""An HTTP server that answers as a recorded vLLM 0.32.0 did, and misbehaves on demand.

Answers and scores are those that a real server gave (tests/data/verify-null.jsonl.gz, written by
scripts/record_null.py). Of a token that was not recorded it says what the real one said of some
damaged token, the same one each time.
"""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mtppp.verify.prompts import own_set

DATA = Path(__file__).parents[2] / "data" / "verify-null.jsonl.gz"


@dataclass(frozen=True)
class Recorded:
    """What was recorded of one prompt."""

    key: str
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str
    gap: tuple[float, ...]
    rank: tuple[int, ...]
    logprob: tuple[float, ...]
    other: tuple[int, ...]
    other_gap: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """All of a file."""

    head: dict[str, Any]
    by_ids: dict[tuple[int, ...], Recorded]
    by_text: dict[str, tuple[int, ...]]
    damaged: list[list[list[float]]]
    random: list[list[list[float]]]

    @property
    def all(self) -> list[Recorded]:
        return list(self.by_ids.values())


@cache
def recording() -> Recording:
    with gzip.open(DATA, "rt") as file:
        head, *lines, last = [json.loads(line) for line in file]
    recorded = [
        Recorded(**{k: tuple(v) if isinstance(v, list) else v for k, v in line.items()})
        for line in lines
    ]
    ids = {one.key: one.ids for one in recorded}
    texts = {
        prompt.text or json.dumps(prompt.messages): ids[prompt.key]
        for prompt in own_set(len(recorded))
    }
    return Recording(
        head, {one.ids: one for one in recorded}, texts, last["damaged"], last["random"]
    )


Fault = Callable[[Recorded, list[int], random.Random], Sequence[int]]
"""(what was recorded, its tokens, chance) -> the tokens that are answered instead."""


class Replay:
    """One server.

    Attributes:
        seed: of chance, in sampling and in faults.
        model, root: what it says it serves.
        fault: what a greedy answer becomes; sampled_fault: the same at temperature above 0.
        misbehave: (path, request) -> (status, body) in place of the right answer; None for that.
        metrics: the page of /metrics.
        asked: path and body of every request.
        tokenizer: whether it has one.
        shifted: whether it tells of each position what belongs to the next.
        calls_finished: whether it says "stop" of an answer that a fault has made shorter.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.model = "demo-glm4-moe"
        self.root = "/models/demo-glm4-moe"
        self.fault: Fault | None = None
        self.sampled_fault: Fault | None = None
        self.misbehave: Callable[[str, dict[str, Any]], tuple[int, bytes] | None] | None = None
        self.metrics = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tokenizer = True
        self.shifted = False
        self.calls_finished = False
        self.context = recording().head["context"]
        self.seed = seed
        self._counter = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        # A client that gives up closes its connections.
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        with self._lock:
            self._counter += 1
            number = self._counter
            self.asked.append((path, body))
        if self.misbehave and (wrong := self.misbehave(path, body)) is not None:
            return wrong
        answering = {
            "/v1/models": lambda: _ok(self._models()),
            "/version": lambda: _ok({"version": recording().head["release"]}),
            "/metrics": lambda: (200, self.metrics.encode()),
            "/v1/completions": lambda: self._completion(body, number),
        }
        if self.tokenizer:
            answering["/tokenize"] = lambda: _ok({"tokens": self.ids_of(_asked(body))})
            answering["/detokenize"] = lambda: _ok({"prompt": _text(body["tokens"])})
        if path in answering:
            return answering[path]()
        return 404, b'{"detail":"Not Found"}'

    def _models(self) -> dict[str, Any]:
        card = {"id": self.model, "root": self.root, "max_model_len": self.context}
        return {"object": "list", "data": [card | {"parent": None}]}

    def ids_of(self, text: str) -> list[int]:
        known = recording().by_text.get(text)
        return list(known) if known else list(text.encode()[:64])

    def _completion(self, body: dict[str, Any], number: int) -> tuple[int, bytes]:
        prompt = body["prompt"]
        ids = tuple(self.ids_of(prompt) if isinstance(prompt, str) else prompt)
        if body["model"] != self.model:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if max(ids) >= recording().head["vocabulary"]:
            return _error(400, f"Token id {max(ids)} is out of vocabulary")
        choice: dict[str, Any] = {"index": 0, "text": "", "prompt_token_ids": list(ids)}
        if "prompt_logprobs" in body:
            choice |= {"token_ids": [0], "finish_reason": "length"}
            choice["prompt_logprobs"] = self.scored(ids, body["prompt_logprobs"])
        else:
            tokens, finish = self.generated(ids, body, number)
            choice |= {"token_ids": list(tokens), "finish_reason": finish}
        usage = {"completion_tokens": len(choice["token_ids"])}
        return _ok({"id": f"cmpl-{self.seed}-{number}", "choices": [choice], "usage": usage})

    def generated(
        self, ids: tuple[int, ...], body: dict[str, Any], number: int
    ) -> tuple[Sequence[int], str]:
        recorded = recording().by_ids.get(ids)
        if recorded is None:
            return [5] * body["max_tokens"], "length"
        chance = random.Random(f"{self.seed}/{recorded.key}/{body['temperature']}")
        is_sampled = body["temperature"] > 0
        tokens, finish = (
            _sampled(recorded, chance) if is_sampled else (list(recorded.tokens), recorded.finish)
        )
        fault = self.sampled_fault if is_sampled else self.fault
        answered = list(fault(recorded, tokens, chance) if fault else tokens)
        if len(answered) < len(tokens) and self.calls_finished:
            finish = "stop"
        most = body["max_tokens"]
        return answered[:most], "length" if len(answered) > most else finish

    def scored(self, ids: tuple[int, ...], count: int = 1) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of prompt and answer; of the others, one more was recorded."""
        positions: list[dict[str, Any] | None] = [None]
        positions += [{str(token): {"logprob": -1e-4, "rank": 1}} for token in ids[1:]]
        recorded = _prompt_of(ids)
        if recorded is None:
            return positions
        start = len(recorded.ids)
        for i, (token, entry) in enumerate(_scores(recorded, ids[start:])):
            gap, rank, logprob, other = entry
            position = {str(token): {"logprob": logprob, "rank": rank}}
            best = min(0.0, logprob + gap)
            if rank > 1 or gap > 0:
                position[str(other)] = {"logprob": best, "rank": 1}
            elif count > 1 and i < len(recorded.tokens):
                second = logprob - recorded.other_gap[i]
                position[str(other)] = {"logprob": second, "rank": 2}
            positions[start + i] = position
        return [None, *positions[2:], positions[-1]] if self.shifted else positions

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        replay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self._give(*replay.answer(self.path, {}))

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                self._give(*replay.answer(self.path, json.loads(self.rfile.read(length))))

            def _give(self, status: int, body: bytes) -> None:
                if status == HANG:
                    time.sleep(float(body))
                    self.close_connection = True
                    return
                if status in (CUT, DROP):
                    if status == CUT:
                        self.send_response(200)
                        self.send_header("content-length", str(len(body) + 100))
                        self.end_headers()
                        self.wfile.write(body)
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


HANG, CUT, DROP = -1, -2, -3
"""Statuses of `misbehave`: no answer for so many seconds, a body that ends early, none at all."""


def _asked(body: dict[str, Any]) -> str:
    messages = [[m["role"], m["content"]] for m in body.get("messages", [])]
    return body.get("prompt") or json.dumps(messages)


def _text(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def _ok(body: object) -> tuple[int, bytes]:
    return 200, json.dumps(body).encode()


def _error(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"message": message, "code": status}}).encode()


@cache
def _by_beginning() -> dict[tuple[int, ...], list[Recorded]]:
    found: dict[tuple[int, ...], list[Recorded]] = {}
    for one in sorted(recording().all, key=lambda one: -len(one.ids)):
        found.setdefault(one.ids[:4], []).append(one)
    return found


def _prompt_of(ids: tuple[int, ...]) -> Recorded | None:
    """The longest recorded prompt that this begins with."""
    for one in _by_beginning().get(ids[:4], []):
        if len(one.ids) < len(ids) and ids[: len(one.ids)] == one.ids:
            return one
    return None


def _scores(
    recorded: Recorded, tokens: Sequence[int]
) -> Iterator[tuple[int, tuple[float, int, float, int]]]:
    """Gap, rank and log probability of each token, and the best other one."""
    pool = recording().damaged
    after_damage = parted = False
    for i, token in enumerate(tokens):
        known = i < len(recorded.tokens) and token == recorded.tokens[i]
        before = tuple(tokens[max(0, i - 2) : i])
        if known and not after_damage:
            yield (
                token,
                (recorded.gap[i], recorded.rank[i], recorded.logprob[i], recorded.other[i]),
            )
        elif i < len(recorded.tokens) and token == recorded.other[i] and not after_damage:
            gap = recorded.other_gap[i]
            yield token, (gap, 2, recorded.logprob[i] - gap, recorded.tokens[i])
            parted = True
        elif parted and token == _end():
            yield token, (0.0, 1, -1e-4, recorded.tokens[0])
        elif (before, token) in _trigrams(recorded.key):
            yield token, (0.0, 1, -0.1, 0)
        else:
            draw = zlib.crc32(repr((before, token, i)).encode())
            gaps, ranks, logprobs = pool[draw % len(pool)]
            yield token, (gaps[0], ranks[0], logprobs[0], recorded.tokens[0] ^ 1)
        after_damage = after_damage or not known


@cache
def _end() -> int:
    """The token that ends answers."""
    return next(one.tokens[-1] for one in recording().all if one.finish == "stop")


@cache
def _by_key() -> dict[str, Recorded]:
    return {one.key: one for one in recording().all}


@cache
def _trigrams(key: str) -> frozenset[tuple[tuple[int, ...], int]]:
    """What follows what in a recorded answer: after damage a model goes on with it."""
    tokens = _by_key()[key].tokens
    return frozenset((tuple(tokens[i - 2 : i]), tokens[i]) for i in range(2, len(tokens)))


def _sampled(recorded: Recorded, chance: random.Random) -> tuple[list[int], str]:
    """An answer that ends after the first token that is not the best: what follows was not
    recorded."""
    tokens = []
    for token, logprob, other in zip(
        recorded.tokens, recorded.logprob, recorded.other, strict=True
    ):
        if chance.random() < 2.718281828**logprob:
            tokens.append(token)
            continue
        return [*tokens, other, _end()], "stop"
    return tokens, recorded.finish
