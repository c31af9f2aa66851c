"""Thousands of requests to one vLLM server: token ids in, token ids or log probabilities out.

Every answer is checked before it is believed. A server that does not do what was asked raises
`Inconclusive`, a request that no server could answer (a wrong key or model) `ConfigurationError`:
what comes back is either usable or an error with its reason.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp

from mtppp.engine.client import Acceptance, acceptance_in
from mtppp.errors import ConfigurationError, Inconclusive, MtpppError

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each new attempt
LONGEST_PAUSE = 60.0
LARGEST_BODY = 256 << 20
CONNECT_TIMEOUT = 30.0  # seconds
IDLE = 4.0  # seconds until an idle connection is closed; the server's own limit is 5
_LARGEST_NUMBER = (1 << 31) - 1  # of ids, ranks and lengths

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer that is not made as vLLM's raises."""

# What the model's generation_config.json might set otherwise, and what would make the emitted
# token differ from the most probable one.
_PLAIN_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server generated.

    Attributes:
        finish: why it ended, "stop" or "length".
    """

    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Scores:
    """What a server thinks of tokens that it was given, each after those before it.

    Attributes:
        gap: nats by which it would rather have had another token; 0 where it would not.
        rank: of the token, 1 for the best.
        best: the token that it prefers.
        logprob: of the token, nats.
    """

    gap: array[float]
    rank: array[int]
    best: array[int]
    logprob: array[float]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server says it serves.

    Attributes:
        root: path or hub id that it was loaded from.
        context: tokens that a prompt and its answer may have together.
    """

    name: str
    root: str
    context: int


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _LARGEST_NUMBER:
        raise ValueError(value)
    return number


def _told_by(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"cannot connect: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__


class BulkClient:
    """Requests to one server, up to `concurrency` at a time, in an asyncio loop.

    Of aiohttp, and not of httpx as the launch's few requests: it takes far less processor time for
    each, and a client that is late leaves slots of a fast server empty (`scripts/bench_client.py`).

    Args:
        role: what messages call the server, "candidate" or "baseline".
        key: for the Authorization header; "" for none.
        timeout: seconds for one answer.
        socket: path of a Unix socket that leads to the server; "" to connect from here.
        headers: sent with each request besides.
        pause: waits before a new attempt.
    """

    def __init__(
        self,
        url: str,
        *,
        role: str,
        key: str = "",
        timeout: float = 600.0,
        concurrency: int = 16,
        socket: str = "",
        headers: Mapping[str, str] | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.role = role
        self.concurrency = concurrency
        self._timeout = timeout
        self._pause = pause
        self._salt = secrets.token_hex(8)
        self._requests = 0
        self._seen: set[str] = set()
        self._answered = False
        self._socket = socket
        self._headers = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = (
            aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=IDLE)
            if self._socket
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # The whole of an answer has its own limit, at which no request is sent again.
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=min(self._timeout, CONNECT_TIMEOUT)
            ),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session().close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("a client is used in `async with`")
        return self._http

    async def models(self) -> list[ModelCard]:
        """What is served, adapters left out."""
        body = await self._json("GET", "/v1/models")
        try:
            return [
                ModelCard(
                    _text(card["id"]),
                    _text(card.get("root") or ""),
                    _number(card.get("max_model_len") or 0),
                )
                for card in body["data"]
                if not card.get("parent")
            ]
        except _MALFORMED:
            raise self._no_vllm("/v1/models", body) from None

    async def version(self) -> str:
        """The server's release; "" when it does not say."""
        try:
            body = await self._json("GET", "/version")
        except (Inconclusive, ConfigurationError):
            return ""
        return str(body.get("version", "")) if isinstance(body, dict) else ""

    async def acceptance(self) -> Acceptance | None:
        """Counters of speculative decoding; None when the server has no /metrics."""
        try:
            body = await self._request("GET", "/metrics")
            return acceptance_in(body.decode("utf-8", "replace"))
        except (Inconclusive, ConfigurationError, *_MALFORMED):
            return None

    async def tokenize(
        self, model: str, prompt: str | Sequence[tuple[str, str]]
    ) -> tuple[int, ...] | None:
        """Ids of a text, or of a conversation under the chat template.

        None when the server cannot: it has no tokenizer, or the model no chat template.
        """
        asked: dict[str, Any] = {"model": model}
        if isinstance(prompt, str):
            asked["prompt"] = prompt
        else:
            asked["messages"] = [{"role": role, "content": content} for role, content in prompt]
            asked["add_generation_prompt"] = True
        try:
            body = await self._json("POST", "/tokenize", asked, refusals=(400, 404, 405, 501, 500))
        except _RefusedError:
            return None
        return self._ids(body, "tokens", "/tokenize")

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str | None:
        """The text of token ids; None when the server cannot."""
        asked = {"model": model, "tokens": list(tokens)}
        try:
            body = await self._json(
                "POST", "/detokenize", asked, refusals=(400, 404, 405, 501, 500)
            )
        except _RefusedError:
            return None
        text = body.get("prompt") if isinstance(body, dict) else None
        return text if isinstance(text, str) else None

    async def generate(
        self, model: str, prompt: Sequence[int], tokens: int, *, temperature: float = 0.0
    ) -> Answer:
        """Let it continue a prompt. Log probabilities are not asked for: asking can switch
        speculative decoding off."""
        body = await self._completion(model, prompt, max_tokens=tokens, temperature=temperature)
        choice = body["choices"][0]
        if choice.get("token_ids") is None:
            raise Inconclusive(
                f"the {self.role} at {self.url} answers with text and without token ids",
                hint="vLLM 0.10.2 and newer have return_token_ids; is a proxy in between?",
            )
        finish = choice.get("finish_reason")
        return Answer(self._ids(choice, "token_ids", "/v1/completions"), str(finish))

    async def score(self, model: str, ids: Sequence[int], first: int) -> Scores:
        """What it thinks of the tokens from position `first` on, each after those before."""
        scores, _ = await self.likeliest(model, ids, first, 1)
        return scores

    async def likeliest(
        self, model: str, ids: Sequence[int], first: int, count: int
    ) -> tuple[Scores, list[dict[int, float]]]:
        """The same, with the log probabilities (nats) of the `count` likeliest tokens at each
        position, and of the token itself."""
        body = await self._completion(
            model, ids, max_tokens=1, temperature=0.0, prompt_logprobs=count
        )
        positions = body["choices"][0].get("prompt_logprobs")
        if positions is None:
            raise Inconclusive(
                f"the {self.role} at {self.url} ignores prompt_logprobs: it cannot score",
                hint="score with vLLM itself, and without a proxy that drops the field",
            )
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise self._unusable("prompt_logprobs has not one entry for each prompt token")
        scores = Scores(array("d"), array("l"), array("l"), array("d"))
        return scores, [
            self._add_score(scores, token, position)
            for token, position in zip(ids[first:], positions[first:], strict=True)
        ]

    def _add_score(self, scores: Scores, token: int, position: Any) -> dict[int, float]:
        """Take what one position tells of its token; the log probabilities that it has."""
        try:
            known = {_number(other): float(entry["logprob"]) for other, entry in position.items()}
            logprob, rank = known[token], _number(position[str(token)]["rank"])
        except _MALFORMED:
            raise self._unusable(
                f"a position of prompt_logprobs does not tell of its own token, {token}"
            ) from None
        if not all(map(math.isfinite, known.values())):
            raise self._unusable("log probabilities that are not numbers (NaN or infinite)")
        highest = max(known.values())
        # A token that ties with the best may have rank 2.
        if highest > 1e-3 or rank < 1 or (rank == 1 and logprob < highest):
            raise self._unusable(
                f"log probabilities that cannot be: {logprob:g} at rank {rank}, best {highest:g}"
            )
        scores.gap.append(highest - logprob)
        scores.rank.append(rank)
        # The same one of several that tie, whichever was asked about: vLLM names that one first.
        scores.best.append(min(other for other, one in known.items() if one == highest))
        scores.logprob.append(logprob)
        return known

    async def _completion(self, model: str, ids: Sequence[int], **asked: Any) -> dict[str, Any]:
        self._requests += 1
        body = await self._json(
            "POST",
            "/v1/completions",
            {
                "model": model,
                "prompt": list(ids),
                "return_token_ids": True,
                # Nothing is to come from the prefix cache, whatever was asked before.
                "cache_salt": f"{self._salt}-{self._requests}",
                **_PLAIN_SAMPLING,
                **asked,
            },
        )
        try:
            choice, name = body["choices"][0], str(body["id"])
            returned = choice.get("prompt_token_ids")
        except _MALFORMED:
            raise self._no_vllm("/v1/completions", body) from None
        if name in self._seen:
            raise self._unusable(
                f"two requests got answers with the same id, {name}: is a cache in between?"
            )
        self._seen.add(name)
        if returned is not None and returned != list(ids):
            raise self._unusable("an answer to other prompt tokens than were sent")
        return dict(body)

    def _ids(self, body: Any, name: str, path: str) -> tuple[int, ...]:
        ids = body.get(name) if isinstance(body, dict) else None
        if not isinstance(ids, list) or not all(
            type(i) is int and 0 <= i <= _LARGEST_NUMBER for i in ids
        ):
            raise self._no_vllm(path, body)
        return tuple(ids)

    async def _json(
        self,
        method: str,
        path: str,
        asked: Mapping[str, Any] | None = None,
        refusals: Sequence[int] = (),
    ) -> Any:
        body = await self._request(method, path, asked, refusals)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            text = body[:200].decode("utf-8", "replace")
            raise self._unusable(f"{path} did not answer with JSON: {text!r}") from None

    async def _request(
        self,
        method: str,
        path: str,
        asked: Mapping[str, Any] | None = None,
        refusals: Sequence[int] = (),
    ) -> bytes:
        for pause in (*PAUSES, None):
            problem, wait = "", 0.0
            try:
                async with asyncio.timeout(self._timeout):
                    status, body, wait = await self._send(method, path, asked)
                self._answered = True
                if status == 200:
                    return body
                text = body[:300].decode("utf-8", "replace")
                problem = f"answered {status}: {text}"
                if status in refusals:
                    raise _RefusedError(text)
                if status not in RETRIED:
                    raise self._refused(path, status, text)
            except TimeoutError:
                raise Inconclusive(
                    f"the {self.role} at {self.url} gave no answer to {path} in"
                    f" {self._timeout:g} s",
                    hint="it hangs, or is slower than that: then raise --timeout",
                ) from None
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
                raise ConfigurationError(
                    f"{self.url} is not a URL of a server", hint="such as http://10.0.0.1:8000"
                ) from None
            except aiohttp.ClientPayloadError:
                problem = "the answer broke off before its end, or cannot be decoded"
            except (aiohttp.ClientError, OSError) as error:
                # One that has answered may be restarted; one that never has is not there.
                refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
                if refused and not self._answered and not self._socket:
                    raise Inconclusive(
                        f"the {self.role} at {self.url}: connection refused: nothing listens there",
                        hint=f"start the {self.role}, or give the URL at which it serves",
                    ) from None
                problem = _told_by(error)
            except ValueError as error:  # of aiohttp: a host or header that cannot be
                raise ConfigurationError(
                    f"the {self.role} at {self.url} cannot be asked: {error}",
                    hint=f"see the URL, and MTPPP_{self.role.upper()}_KEY: one key, on one line",
                ) from None
            if pause is not None:
                await self._pause(min(LONGEST_PAUSE, max(pause, wait)))
        raise Inconclusive(
            f"the {self.role} at {self.url}: {path}: {problem}",
            hint=f"{len(PAUSES) + 1} attempts failed; "
            + (f"the {self.role}'s log says why" if self._answered else "is the URL right?"),
        )

    async def _send(
        self, method: str, path: str, asked: Mapping[str, Any] | None
    ) -> tuple[int, bytes, float]:
        """Status, body, and the seconds that the server asks to wait."""
        content = json.dumps(asked).encode() if asked is not None else None
        headers = {"Content-Type": "application/json"} if asked is not None else {}
        async with self._session().request(
            method, self.url + path, data=content, headers=headers, allow_redirects=False
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise self._unusable(f"{path} answered with more than {LARGEST_BODY} bytes")
        wait = response.headers.get("retry-after", "")
        return response.status, bytes(body), float(wait) if wait.isdecimal() else 0.0

    def _refused(self, path: str, status: int, text: str) -> MtpppError:
        if status in (401, 403):
            return ConfigurationError(
                f"the {self.role} at {self.url} wants a key ({status})",
                hint=f"export MTPPP_{self.role.upper()}_KEY",
            )
        if status == 404 and "does not exist" in text:
            return ConfigurationError(
                f"the {self.role} at {self.url}: {text}",
                hint=f"name the model that it serves with --{self.role}-model",
            )
        if status == 400 and "out of vocabulary" in text:
            return Inconclusive(
                f"the {self.role} at {self.url} has another vocabulary: {text}",
                hint="the two do not serve the same model",
            )
        return Inconclusive(f"the {self.role} at {self.url}: {path} answered {status}: {text}")

    def _unusable(self, what: str) -> Inconclusive:
        return Inconclusive(f"the {self.role} at {self.url} gave {what}")

    def _no_vllm(self, path: str, body: Any) -> Inconclusive:
        return Inconclusive(
            f"the {self.role} at {self.url} did not answer {path} as vLLM does:"
            f" {json.dumps(body)[:200]}"
        )


class _RefusedError(Exception):
    """A status that means the server has no such ability."""


async def for_each(
    items: Iterable[Item],
    work: Callable[[Item], Awaitable[Result]],
    done: Callable[[Item, Result], None],
    concurrency: int,
) -> None:
    """Work on all items, so many at a time; `done` is told of each as it is finished.

    Raises:
        MtpppError: the first one that any work raised; the work under way is given up.
    """
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            done(item, await work(item))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise _first(failed) from None


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
