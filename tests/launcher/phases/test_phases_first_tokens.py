"""The first request to a server that answers as a recorded vLLM 0.32.0 did."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mtppp.console import Step
from mtppp.engine.client import BadAnswer
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.first_tokens import FirstTokens

Deploy = Callable[..., Deployment]

KEY = "unit-secret-key"
METRICS = (Path(__file__).parents[2] / "data" / "vllm-0.32.0-metrics.txt").read_text()
COMPLETION = {
    "choices": [{"text": " 37 42", "finish_reason": "length"}],
    "usage": {"completion_tokens": 32},
}
CHAT = {
    "choices": [{"message": {"content": "five"}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 4},
}
NO_TEMPLATE = {"error": {"message": "default chat template is no longer allowed", "code": 400}}


@pytest.fixture
def served(free_port: int) -> Iterator[dict[str, Any]]:
    """Answers by path; those under /v1 only to who has the key."""
    answers: dict[str, Any] = {
        "/v1/models": (200, {"data": [{"id": "demo"}]}),
        "/v1/completions": (200, COMPLETION),
        "/v1/chat/completions": (200, CHAT),
        "/metrics": (200, METRICS),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            key = self.headers.get("authorization")
            if self.path.startswith("/v1/") and key != f"Bearer {KEY}":
                status, body = 401, {"error": "Unauthorized"}
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    http = ThreadingHTTPServer(("127.0.0.1", free_port), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield answers
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def deployment(deploy: Deploy, served: dict[str, Any]) -> Deployment:
    made = deploy(secrets=["VLLM_API_KEY"])
    made.secrets = {"VLLM_API_KEY": KEY}
    return made


def test_text_and_chat_come(deployment: Deployment, step: Step) -> None:
    FirstTokens().run(deployment, step)
    assert step.note.startswith("' 37 42' (32 tokens in ")
    assert step.note.endswith("; chat: 'five'")


def test_a_model_without_a_chat_template_is_no_failure(
    deployment: Deployment, step: Step, served: dict[str, Any]
) -> None:
    served["/v1/chat/completions"] = (400, NO_TEMPLATE)
    FirstTokens().run(deployment, step)
    assert step.note.endswith("; the model has no chat template")


@pytest.mark.parametrize("status", [400, 500])
def test_another_error_of_chat_is_one(
    deployment: Deployment, step: Step, served: dict[str, Any], status: int
) -> None:
    served["/v1/chat/completions"] = (status, {"error": "out of order"})
    with pytest.raises(BadAnswer, match=f" answered {status}: "):
        FirstTokens().run(deployment, step)


def test_a_server_of_somebody_else(
    deployment: Deployment, step: Step, served: dict[str, Any]
) -> None:
    served["/v1/models"] = (200, {"data": [{"id": "x"}, {"id": "y"}]})
    with pytest.raises(MtpppError) as raised:
        FirstTokens().run(deployment, step)
    assert raised.value.message == f"{deployment.plan.endpoint} serves x, y, not demo"


def test_no_token_at_all(deployment: Deployment, step: Step, served: dict[str, Any]) -> None:
    served["/v1/completions"] = (200, COMPLETION | {"usage": {"completion_tokens": 0}})
    with pytest.raises(MtpppError, match="with no token at all"):
        FirstTokens().run(deployment, step)


def test_a_drafter_that_does_not_draft(
    deployment: Deployment, step: Step, served: dict[str, Any]
) -> None:
    served["/metrics"] = (200, "")
    with pytest.raises(MtpppError) as raised:
        FirstTokens().run(deployment, step)
    assert raised.value.message == (
        f"{deployment.plan.endpoint}: tokens come, but the drafter drafted none"
    )
    assert raised.value.hint.endswith(f" is a:{deployment.plan.head.directory}/server.log")


def test_without_the_key_the_server_says_no(deployment: Deployment, step: Step) -> None:
    deployment.secrets = {}
    with pytest.raises(BadAnswer, match=" answered 401: "):
        FirstTokens().run(deployment, step)
