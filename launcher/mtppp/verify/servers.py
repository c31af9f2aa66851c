"""Who is compared: what each server says of itself, and whether the two can be compared at all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

import httpx

from mtppp.engine.bulk import BulkClient, ModelCard
from mtppp.errors import ConfigurationError

# The cache of the hub keeps a model as models--ORG--NAME/snapshots/COMMIT.
_SNAPSHOT = re.compile(r"models--(?:.+--)?(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]+)")

NODES_DIFFER = "DIFFER"
"""What is known of a deployment begins so where its nodes do not have the same."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})  # noqa: S104 - compared only
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Server:
    """A server as the operator names it.

    Attributes:
        role: "candidate" or "baseline".
        model: the served name to ask for; "" for the only one.
        key: for the Authorization header.
        transport: how it is reached, for the report.
        socket: path of a Unix socket that leads to it; "" to connect from here.
        headers: sent with each request besides.
    """

    role: str
    url: str
    model: str = ""
    key: str = ""
    transport: str = "directly"
    socket: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def same_server(one: Server, other: Server) -> bool:
    """Whether both are reached at one place, as far as their URLs tell.

    Raises:
        ConfigurationError: one is no URL.
    """
    return _place(one) == _place(other)


def _place(server: Server) -> tuple[str, str, int | None, str, str]:
    try:
        url = httpx.URL(server.url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{server.url} is not a URL: {error}") from None
    host = url.host.rstrip(".")
    loops = host in _LOOPBACK
    path = url.path.rstrip("/").removesuffix("/v1").rstrip("/")
    # A loopback address means another machine where a socket leads to one.
    return (
        url.scheme,
        "127.0.0.1" if loops else host,
        url.port or _PORTS.get(url.scheme),
        path,
        server.socket if loops else "",
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself.

    Attributes:
        root: path or hub id of the weights.
        context: tokens that prompt and answer may have together; 0 when it does not say.
        release: vLLM's; "" when it does not say.
        about: what else is known: layout, patches, arguments.
    """

    url: str
    model: str
    root: str
    context: int
    release: str
    transport: str
    about: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def survey(client: BulkClient, server: Server, about: dict[str, Any]) -> Identity:
    """Ask a server what it is.

    Raises:
        ConfigurationError: it does not serve the model that was named, or several and none was.
    """
    cards = await client.models()
    card = _chosen(cards, server)
    return Identity(
        url=client.url,
        model=card.name,
        root=card.root,
        context=card.context,
        release=await client.version(),
        transport=server.transport,
        about=about,
    )


def _chosen(cards: Sequence[ModelCard], server: Server) -> ModelCard:
    names = ", ".join(card.name for card in cards) or "nothing"
    if server.model:
        for card in cards:
            if card.name == server.model:
                return card
        raise ConfigurationError(
            f"the {server.role} at {server.url} serves {names}, not {server.model}",
            hint=f"name one that it serves with --{server.role}-model",
        )
    if len({card.root for card in cards}) != 1:
        raise ConfigurationError(
            f"the {server.role} at {server.url} serves {names}",
            hint=f"say which with --{server.role}-model",
        )
    return cards[0]


def differences(candidate: Identity, baseline: Identity) -> list[str]:
    """Why the two cannot be compared; [] when nothing speaks against it.

    Directories may differ, so the weights are told by the last part of their path.
    """
    ours, theirs = weights_of(candidate.root), weights_of(baseline.root)
    found = []
    if ours[0] and theirs[0] and ours[0].lower() != theirs[0].lower():
        found.append(
            f"other weights: the candidate has {candidate.root}, the baseline {baseline.root}"
        )
    if ours[1] and theirs[1] and ours[1] != theirs[1]:
        found.append(
            f"another revision: the candidate has {ours[1][:12]}, the baseline {theirs[1][:12]}"
        )
    for name, what in (("weights", "other weights"), ("config", "another configuration")):
        our, their = (str(each.about.get(name, "")) for each in (candidate, baseline))
        # Nodes of one deployment that differ are no reason not to look at what it emits.
        alike = not any(each.startswith(NODES_DIFFER) for each in (our, their))
        if our and their and alike and our != their:
            found.append(f"{what}: by its hash the candidate has {our}, the baseline {their}")
    return found


def changed(noted: Identity, now: Identity) -> list[str]:
    """What a server says otherwise than before, by whatever way it is reached; [] for nothing."""
    before = {**noted.to_dict(), **noted.about}
    after = {**now.to_dict(), **now.about}
    return [
        f"{name} was {before.get(name, 'not known')}, is {after.get(name, 'not known')}"
        for name in dict.fromkeys((*before, *after))
        if name not in ("transport", "about") and before.get(name) != after.get(name)
    ]


def weights_of(root: str) -> tuple[str, str]:
    """Name and revision of weights, by where they were loaded from; "" for what is not known."""
    if snapshot := _SNAPSHOT.search(root):
        return snapshot["name"], snapshot["revision"]
    return PurePosixPath(root).name, ""
