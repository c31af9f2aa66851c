"""Holds requests until the deployment was verified: an ASGI middleware of vLLM's API server.

`vllm serve --middleware mtppp_patches.gate.Gate` puts it before everything else, authentication
included. Until it is opened, who does not have the launch's key gets 503, whatever is asked for:
also /health, /ping and /v1/models, by which load balancers and routers would call the server ready.
Only /metrics is for all; nobody takes it for readiness, and a server is watched while it waits.

Three files in the run directory, where only its owner can write:

- `gate-key`, by the launch before it starts the server: what its own requests bear in a header.
- `gate-server.json`, by the server: `instance`, a number of its own, new with each process.
- `gate-open.json`, by who opens: the `instance` that was verified. The gate of any other server
  stays closed: of one that was restarted in between, or that comes after a launch of yesterday.

Once open, it stays so until the process ends: what cleans old files away does not close it.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from mtppp_patches.engine_spec import RUN_DIR_VARIABLE

MIDDLEWARE = "mtppp_patches.gate.Gate"
KEY_FILE = "gate-key"
SERVER_FILE = "gate-server.json"
OPEN_FILE = "gate-open.json"

KEY_HEADER = "x-mtppp-gate-key"
CLOSED_HEADER = "x-mtppp-gate"
"""On an answer of a closed gate, by which it is told from any other 503."""
RETRY_AFTER = 15
"""Seconds after which a client may ask again."""

_FOR_ALL = frozenset({"/metrics", "/metrics/"})
_SHORTEST_KEY = 32

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_BODY = json.dumps(
    {
        "error": {
            "message": "not open yet: mtppp holds requests until this deployment was verified",
            "type": "not_open_yet",
            "param": None,
            "code": 503,
        }
    }
).encode()


class GateError(RuntimeError):
    """Nothing is to be served: nobody could open the gate."""


class Gate:
    """The middleware. Made once, when the server begins to listen.

    Raises:
        GateError: it has no run directory, or no launch has put a key there.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._directory = _run_directory()
        self._key = _key(self._directory)
        self._opened = False
        self._instance = secrets.token_hex(16)
        _replace(self._directory / SERVER_FILE, {"instance": self._instance, "pid": os.getpid()})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        bears_key = self._bears_key(scope)
        if bears_key or scope["path"] in _FOR_ALL or self._is_open():
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1013})  # try again later
        else:
            await _refuse(send)

    def _bears_key(self, scope: Message) -> bool:
        """Whether the request has the key, which is taken out: nothing behind is to log it."""
        name = KEY_HEADER.encode()
        given = [value for header, value in scope["headers"] if header.lower() == name]
        if given:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() != name]
        return any(hmac.compare_digest(value, self._key) for value in given)

    def _is_open(self) -> bool:
        if not self._opened:
            try:
                record = json.loads((self._directory / OPEN_FILE).read_bytes())
            except (OSError, ValueError):
                return False
            self._opened = isinstance(record, dict) and record.get("instance") == self._instance
        return self._opened


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_BODY)).encode()),
        (b"retry-after", str(RETRY_AFTER).encode()),
        (b"cache-control", b"no-store"),
        (CLOSED_HEADER.encode(), b"closed"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})


def _run_directory() -> Path:
    name = os.environ.get(RUN_DIR_VARIABLE)
    if not name:
        raise GateError(
            f"{MIDDLEWARE} is for servers that `mtppp launch` starts: {RUN_DIR_VARIABLE} is not"
            " set. Leave the middleware out to serve without mtppp."
        )
    return Path(name)


def _key(directory: Path) -> bytes:
    try:
        key = (directory / KEY_FILE).read_bytes().strip()
    except OSError as error:
        raise GateError(
            f"{directory / KEY_FILE}: {error.strerror}. The launch writes it; launch again."
        ) from None
    if len(key) < _SHORTEST_KEY:
        raise GateError(f"{directory / KEY_FILE} holds no key of a launch; launch again.")
    return key


def _replace(path: Path, record: dict[str, Any]) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)
