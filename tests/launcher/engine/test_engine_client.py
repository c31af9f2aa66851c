"""The client against a real HTTP server that answers as a recorded vLLM 0.32.0 did."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mtppp.engine.client import Acceptance, BadAnswer, EngineClient, Generated, NotReachable

METRICS = (Path(__file__).parents[2] / "data" / "vllm-0.32.0-metrics.txt").read_text()
MODELS = {"object": "list", "data": [{"id": "demo-glm4-moe", "object": "model", "parent": None}]}
COMPLETION = {
    "id": "cmpl-b4862f87348c408d",
    "object": "text_completion",
    "model": "demo-glm4-moe",
    "choices": [{"index": 0, "text": " 27 27 2", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 23, "total_tokens": 31, "completion_tokens": 8},
}
CHAT = {
    "id": "chatcmpl-92127ba5e4f1beea",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The capital", "reasoning": None},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 9, "total_tokens": 25, "completion_tokens": 16},
}
NO_SUCH_MODEL = {
    "error": {
        "message": "The model `nope` does not exist. Valid aliases: demo-glm4-moe.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
}


@dataclass
class Server:
    """Answers by path; keeps what it was asked."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[tuple[str, str, Any, str | None]] = field(default_factory=list)
    url: str = ""
    hold: threading.Event | None = None

    def gives(self, path: str, body: object, status: int = 200) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.answers[path] = (status, text)


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def answer(self, body: object) -> None:
            key = self.headers.get("authorization")
            scripted.asked.append((self.command, self.path, body, key))
            if scripted.hold is not None:
                scripted.hold.wait(20)
            status, text = scripted.answers.get(self.path, (404, ""))
            self.send_response(status)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    scripted.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield scripted
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[EngineClient]:
    with EngineClient(server.url, timeout=20) as client:
        yield client


def test_healthy_only_when_the_server_says_so(server: Server, client: EngineClient) -> None:
    server.gives("/health", "")
    assert client.healthy()
    server.gives("/health", "", 503)
    assert not client.healthy()


def test_nothing_listens_there() -> None:
    with EngineClient("http://127.0.0.1:9") as client:
        assert not client.healthy()
        with pytest.raises(NotReachable) as raised:
            client.models()
    assert raised.value.message == "http://127.0.0.1:9/v1/models: [Errno 111] Connection refused"


def test_no_answer_in_time(server: Server) -> None:
    server.hold = threading.Event()
    with EngineClient(server.url, timeout=0.05) as client, pytest.raises(NotReachable) as raised:
        client.models()
    server.hold.set()
    assert raised.value.message == f"{server.url}/v1/models gave no answer in 0.05 s"


def test_the_operators_proxy_is_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.gives("/health", "")
    with EngineClient(server.url) as client:
        assert client.healthy()


def test_models(server: Server, client: EngineClient) -> None:
    server.gives("/v1/models", MODELS)
    assert client.models() == ["demo-glm4-moe"]


def test_complete(server: Server, client: EngineClient) -> None:
    server.gives("/v1/completions", COMPLETION)
    generated = client.complete("demo", "count", max_tokens=8, temperature=0)
    assert generated == Generated(" 27 27 2", 8, "length")
    client.complete("demo", [1, 2], return_token_ids=True)
    assert [body for _, _, body, _ in server.asked] == [
        {"model": "demo", "prompt": "count", "max_tokens": 8, "temperature": 0},
        {"model": "demo", "prompt": [1, 2], "return_token_ids": True},
    ]


def test_chat(server: Server, client: EngineClient) -> None:
    server.gives("/v1/chat/completions", CHAT)
    assert client.chat("demo", "Why?", max_tokens=16) == Generated("The capital", 16, "stop")
    [(_, _, body, _)] = server.asked
    assert body == {
        "model": "demo",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 16,
    }


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "reasoning": "hm"}, "hm"),
        ({"content": "", "reasoning": None}, ""),
        ({}, ""),
    ],
)
def test_chat_that_only_thinks_or_says_nothing(
    server: Server, client: EngineClient, message: dict[str, Any], text: str
) -> None:
    choice = {"message": message, "finish_reason": "length"}
    server.gives("/v1/chat/completions", CHAT | {"choices": [choice]})
    assert client.chat("demo", "Why?").text == text


def test_headers_go_with_every_request(server: Server) -> None:
    server.gives("/v1/models", MODELS)
    with EngineClient(server.url, headers={"Authorization": "Bearer key"}) as client:
        client.models()
        client.healthy()
    assert [key for _, _, _, key in server.asked] == ["Bearer key"] * 2


def test_an_error_of_the_server_is_quoted(server: Server, client: EngineClient) -> None:
    server.gives("/v1/completions", NO_SUCH_MODEL, 404)
    with pytest.raises(BadAnswer) as raised:
        client.complete("nope", "x")
    assert raised.value.status == 404
    assert raised.value.message == (
        f"{server.url}/v1/completions answered 404: {json.dumps(NO_SUCH_MODEL)}"
    )


ASK: dict[str, Callable[[EngineClient], object]] = {
    "/v1/models": lambda client: client.models(),
    "/v1/completions": lambda client: client.complete("demo", "x"),
    "/v1/chat/completions": lambda client: client.chat("demo", "x"),
}


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize(
    "body",
    [
        "<html>welcome to nginx</html>",
        "",
        "[]",
        "null",
        "3",
        '{"data": 3, "choices": 3}',
        '{"data": [{}], "choices": [{}]}',
        '{"choices": [], "data": [3]}',
    ],
)
def test_what_does_not_answer_as_vllm_does(
    server: Server, client: EngineClient, path: str, body: str
) -> None:
    server.gives(path, body)
    with pytest.raises(BadAnswer) as raised:
        ASK[path](client)
    assert raised.value.message == f"{server.url}{path} did not answer as vLLM does: {body}"
    assert raised.value.status == 200


def test_acceptance_as_recorded(server: Server, client: EngineClient) -> None:
    server.gives("/metrics", METRICS)
    assert client.acceptance() == Acceptance(drafts=19, accepted=(13, 12, 5))


def test_acceptance_of_a_server_that_does_not_speculate(
    server: Server, client: EngineClient
) -> None:
    lines = [line for line in METRICS.splitlines() if "spec_decode" not in line]
    assert len(lines) > 5
    server.gives("/metrics", "\n".join(lines))
    assert client.acceptance() == Acceptance(drafts=0, accepted=())


def test_acceptance_of_several_engines_is_their_sum(server: Server, client: EngineClient) -> None:
    server.gives("/metrics", METRICS + METRICS.replace('engine="0"', 'engine="1"'))
    assert client.acceptance() == Acceptance(drafts=38, accepted=(26, 24, 10))


def test_labels_may_hold_anything(server: Server, client: EngineClient) -> None:
    odd = r'model_name="a}b,position=\"7\" \\"'
    server.gives("/metrics", METRICS.replace('model_name="demo-glm4-moe"', odd))
    assert client.acceptance() == Acceptance(drafts=19, accepted=(13, 12, 5))
