"""The gate of the API server: who is let through, what opens it, and what does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtppp_patches.gate import (
    CLOSED_HEADER,
    KEY_FILE,
    KEY_HEADER,
    OPEN_FILE,
    SERVER_FILE,
    Gate,
    GateError,
)

KEY = "0123456789abcdef" * 4
KEYED = {KEY_HEADER: KEY}


class Behind:
    """What the gate is before: answers 200, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"tokens"})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory as a launch leaves it before it starts the server."""
    (tmp_path / KEY_FILE).write_text(KEY)
    monkeypatch.setenv("MTPPP_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def behind() -> Behind:
    return Behind()


def ask(gate: Gate, path: str, headers: Any = None) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(once())


def open_for(directory: Path, instance: object) -> None:
    (directory / OPEN_FILE).write_text(json.dumps({"instance": instance, "why": "PASS"}))


def instance_of(directory: Path) -> str:
    return str(json.loads((directory / SERVER_FILE).read_text())["instance"])


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/ping", "/v1/models", "/v1/completions", "/", "/docs", "/tokenize"),
        *("/metrics/../v1/completions", "//metrics", "/metrics/x", "/METRICS"),
    ],
)
def test_strangers_get_503_whatever_they_ask(directory: Path, behind: Behind, path: str) -> None:
    answer = ask(Gate(behind), path)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "15"
    assert answer.headers[CLOSED_HEADER] == "closed"
    assert answer.json()["error"]["type"] == "not_open_yet"
    assert not behind.asked


def test_metrics_are_for_all(directory: Path, behind: Behind) -> None:
    assert ask(Gate(behind), "/metrics").text == "tokens"


def test_the_launch_s_key_lets_through_and_goes_no_further(directory: Path, behind: Behind) -> None:
    gate = Gate(behind)
    assert ask(gate, "/v1/models", {**KEYED, "x-other": "stays"}).status_code == 200
    [scope] = behind.asked
    names = [name for name, _ in scope["headers"]]
    assert b"x-other" in names
    assert KEY_HEADER.encode() not in names


@pytest.mark.parametrize("wrong", ["", KEY[:-1], KEY + "0", KEY.upper(), "ä"])
def test_another_key_does_not(directory: Path, behind: Behind, wrong: str) -> None:
    answer = ask(Gate(behind), "/v1/models", {KEY_HEADER: wrong.encode()})
    assert answer.status_code == 503
    assert not behind.asked


def test_it_opens_for_the_server_that_was_verified_and_stays_open(
    directory: Path, behind: Behind
) -> None:
    gate = Gate(behind)
    assert ask(gate, "/health").status_code == 503
    open_for(directory, instance_of(directory))
    assert ask(gate, "/health").status_code == 200
    # What cleans old files away must not close a server in use.
    (directory / OPEN_FILE).unlink()
    assert ask(gate, "/health").status_code == 200


def test_a_server_that_was_started_again_is_not_the_one_that_was_verified(
    directory: Path, behind: Behind
) -> None:
    first = Gate(behind)
    verified = instance_of(directory)
    open_for(directory, verified)
    again = Gate(behind)
    assert instance_of(directory) != verified
    assert ask(again, "/health").status_code == 503
    assert ask(first, "/health").status_code == 200


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"instance": null}', '{"instance": ""}'])
def test_a_file_that_names_no_server_opens_nothing(
    directory: Path, behind: Behind, text: str
) -> None:
    gate = Gate(behind)
    (directory / OPEN_FILE).write_text(text)
    assert ask(gate, "/health").status_code == 503


def test_what_it_writes_is_its_owner_s_alone(directory: Path, behind: Behind) -> None:
    Gate(behind)
    assert (directory / SERVER_FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in directory.iterdir()) == [KEY_FILE, SERVER_FILE]


def test_websockets_are_held_too(directory: Path, behind: Behind) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(Gate(behind)(scope, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1013}]
    assert not behind.asked


def test_without_a_launch_nothing_is_served(
    directory: Path, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / KEY_FILE).write_text("short")
    with pytest.raises(GateError, match="no key of a launch"):
        Gate(behind)
    (directory / KEY_FILE).unlink()
    with pytest.raises(GateError, match="launch again"):
        Gate(behind)
    monkeypatch.delenv("MTPPP_RUN_DIR")
    with pytest.raises(GateError, match="mtppp launch"):
        Gate(behind)
