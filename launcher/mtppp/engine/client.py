"""A vLLM server's HTTP API, as far as a launch needs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import httpx

from mtppp.errors import MtpppError
from mtppp.hosts.forward import PrivateForwarder
from mtppp_patches.gate import CLOSED_HEADER

# A hung server does not answer at all; a slow link has a round trip or two of several seconds.
_HEALTH_TIMEOUT = 15.0
# Seconds. vLLM closes a connection that is idle for 5 s, and a request just then would be lost.
_IDLE = 2.0

# A label's value is quoted and may hold anything, braces included.
_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][\w:]*)"
    r'(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (?P<value>\S+)',
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


# What reading a body of another shape raises: no JSON, a key or an item missing, another type.
_OTHER_SHAPE = (ValueError, KeyError, IndexError, TypeError, AttributeError)


class EngineError(MtpppError):
    """The server did not answer, or not with what was asked."""


class NotReachable(EngineError):
    """No connection, or no answer in time."""


class BadAnswer(EngineError):
    """An HTTP error status, or a body that is not what the API promises.

    Attributes:
        status: the HTTP status.
        gated: whether it is the gate of mtppp that said so, and not the server behind it.
    """

    def __init__(self, message: str, *, status: int, gated: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.gated = gated


@dataclass(frozen=True, slots=True)
class Generated:
    """What came back of one request: text, number of generated tokens, and why it ended."""

    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counters of speculative decoding since the server started.

    Attributes:
        drafts: verification steps that had drafts.
        accepted: accepted draft tokens at positions 0, 1, ...
    """

    drafts: int
    accepted: tuple[int, ...]


class EngineClient:
    """Talks to one server.

    The operator's HTTP proxy is not used: cluster addresses are not reached through it.

    Args:
        base_url: such as "http://10.0.0.1:8000".
        timeout: seconds for one answer.
        headers: sent with each request, an Authorization for instance.
        forwarder: carries connections to the server; None to connect from here.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        forwarder: PrivateForwarder | None = None,
    ) -> None:
        self.base_url = base_url
        self._timeout = timeout
        self._forwarder = forwarder
        limits = httpx.Limits(keepalive_expiry=_IDLE)
        uds = None if forwarder is None else forwarder.path
        self._http = httpx.Client(
            base_url=base_url,
            timeout=timeout,
            headers=dict(headers or {}),
            trust_env=False,
            transport=httpx.HTTPTransport(uds=uds, limits=limits, trust_env=False),
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def healthy(self) -> bool:
        """Whether the server answers and says that its engine lives.

        False also while nothing listens yet. True does not mean that tokens come: a hung engine
        stays healthy, and behind a closed gate nobody without its key can tell.
        """
        try:
            timeout = min(self._timeout, _HEALTH_TIMEOUT)
            response = self._http.get("/health", timeout=timeout)
        except httpx.HTTPError:
            return False
        return response.status_code == 200 or CLOSED_HEADER in response.headers

    def models(self) -> list[str]:
        """Names under which the server serves its model."""
        response = self._get("/v1/models")
        try:
            return [entry["id"] for entry in response.json()["data"]]
        except _OTHER_SHAPE:
            _refuse(response)

    def complete(self, model: str, prompt: str | list[int], **sampling: Any) -> Generated:
        """One completion of a text or of token ids."""
        response = self._post("/v1/completions", {"model": model, "prompt": prompt, **sampling})
        try:
            body = response.json()
            choice = body["choices"][0]
            return Generated(
                choice["text"], body["usage"]["completion_tokens"], choice["finish_reason"]
            )
        except _OTHER_SHAPE:
            _refuse(response)

    def chat(self, model: str, question: str, **sampling: Any) -> Generated:
        """One answer to one user message."""
        messages = [{"role": "user", "content": question}]
        response = self._post(
            "/v1/chat/completions", {"model": model, "messages": messages, **sampling}
        )
        try:
            body = response.json()
            choice = body["choices"][0]
            message = choice["message"]
            text = message.get("content") or message.get("reasoning") or ""
            return Generated(text, body["usage"]["completion_tokens"], choice["finish_reason"])
        except _OTHER_SHAPE:
            _refuse(response)

    def acceptance(self) -> Acceptance:
        """Speculative decoding's counters, from /metrics; the sum over the server's engines."""
        return acceptance_in(self._get("/metrics").text)

    def generated_tokens(self) -> int:
        """Tokens generated since the server started, from /metrics; the sum over its engines."""
        samples = _SAMPLE.finditer(self._get("/metrics").text)
        return sum(
            int(float(match["value"]))
            for match in samples
            if match["name"] == "vllm:generation_tokens_total"
        )

    def _get(self, path: str) -> httpx.Response:
        return self._checked(self._http.build_request("GET", path))

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._checked(self._http.build_request("POST", path, json=dict(body)))

    def _checked(self, request: httpx.Request) -> httpx.Response:
        try:
            response = self._http.send(request)
        except httpx.TimeoutException:
            raise NotReachable(f"{request.url} gave no answer in {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            forwarded = self._forwarder.problem if self._forwarder is not None else ""
            reason = forwarded or str(error) or type(error).__name__
            raise NotReachable(f"{request.url}: {reason}") from None
        if response.status_code != 200:
            raise BadAnswer(
                f"{request.url} answered {response.status_code}: {response.text[:300]}",
                status=response.status_code,
                gated=CLOSED_HEADER in response.headers,
            )
        return response


def acceptance_in(metrics: str) -> Acceptance:
    """Speculative decoding's counters in a page of /metrics; the sum over the server's engines."""
    drafts = 0.0
    accepted: dict[int, float] = {}
    for match in _SAMPLE.finditer(metrics):
        labels = dict(_LABEL.findall(match["labels"] or ""))
        if match["name"] == "vllm:spec_decode_num_drafts_total":
            drafts += float(match["value"])
        if match["name"] == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = int(labels["position"])
            accepted[position] = accepted.get(position, 0.0) + float(match["value"])
    return Acceptance(int(drafts), tuple(int(accepted[p]) for p in sorted(accepted)))


def _refuse(response: httpx.Response) -> NoReturn:
    raise BadAnswer(
        f"{response.request.url} did not answer as vLLM does: {response.text[:300]}",
        status=response.status_code,
    ) from None
