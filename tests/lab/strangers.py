"""What a deployment answers to those who did not launch it, before and after it was verified."""

from __future__ import annotations

import json

import httpx
from deployments import Server, mtppp
from lab_driver import Lab

from mtppp_patches.gate import CLOSED_HEADER, KEY_FILE, KEY_HEADER

# Status by path: to strangers, to who has the gate's key and not the API's, and to clients.
HELD = {"/health": 503, "/ping": 503, "/v1/models": 503, "/metrics": 200}
UNAUTHORIZED = {"/health": 200, "/ping": 200, "/v1/models": 401, "/metrics": 200}
SERVED = dict.fromkeys(HELD, 200)


def statuses(server: Server, *headers: dict[str, str]) -> dict[str, int]:
    """What somebody with these headers is answered, by path."""
    sent = {name: value for each in headers for name, value in each.items()}
    with httpx.Client(base_url=server.url, headers=sent, timeout=60) as client:
        return {path: client.get(path).status_code for path in HELD}


def assert_held(lab: Lab, server: Server, name: str) -> None:
    """Whoever has not the launch's key gets 503, clients with the API's key among them."""
    client = server.authorization
    for stranger in ({}, client, client | {KEY_HEADER: "0" * 64}):
        assert statuses(server, stranger) == HELD
    body = {"model": server.model, "prompt": "count 3 by 4: 3 7", "max_tokens": 4, "stream": True}
    held = httpx.post(f"{server.url}/v1/completions", json=body, headers=client, timeout=60)
    assert (held.status_code, held.headers[CLOSED_HEADER]) == (503, "closed")
    assert held.json()["error"]["type"] == "not_open_yet"

    key_file = f"/var/tmp/mtppp-0/{name}/0/{KEY_FILE}"
    key = {KEY_HEADER: lab.output("n1", "cat", key_file)}
    assert statuses(server, key) == UNAUTHORIZED
    assert statuses(server, key, client) == SERVED
    assert _where_it_is(lab, key_file) == [key_file], "the key is in a process or in another file"

    told = json.loads(mtppp("status", name, "--json").stdout)
    assert (told["state"], told["gate"], told["gate_why"]) == ("gated", "closed", "")
    refused = mtppp("open", name)
    assert refused.returncode == 2
    assert "nothing was opened" in refused.stderr
    assert statuses(server, client) == HELD


def assert_served(server: Server, name: str, why: str) -> None:
    """Clients are, who then need the API's key alone; `why` is what `status` says of it."""
    assert statuses(server) == UNAUTHORIZED
    assert statuses(server, server.authorization) == SERVED
    told = json.loads(mtppp("status", name, "--json").stdout)
    assert (told["state"], told["gate"]) == ("serving", "open")
    assert told["gate_why"].startswith(why)


def _where_it_is(lab: Lab, key_file: str) -> list[str]:
    """Files of the first host, logs and Ray's among them, and processes, that have the key."""
    # By -f, for grep's own command line is among those that are looked at.
    found = lab.run(
        "n1",
        *("sh", "-c"),
        f"grep -slF -f {key_file} /proc/[0-9]*/cmdline /proc/[0-9]*/environ;"
        f" grep -srlF -D skip -f {key_file} /var/tmp/mtppp-0",
    )
    return found.stdout.split()
