"""A deployment's lock on a node: who holds it, and how to say so."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPUS = "gpus"
"""What a launch claims of a host while it is under way; afterwards its processes tell."""
_DOING = {"launch": "launched", "stop": "stopped", "open": "opened"}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who takes a lock, and what for.

    Attributes:
        who: user@host and process of the operator's side.
        what: the command: launch, stop, open.
        deployment: its name.
        token: what nobody else has; it tells one holder from the next.
    """

    who: str
    what: str
    deployment: str
    token: str

    @classmethod
    def here(cls, what: str, deployment: str) -> Holder:
        """This process."""
        who = f"{operator()} (pid {os.getpid()})"
        return cls(who, what, deployment, secrets.token_hex(16))


def operator() -> str:
    """Who works on this side: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def lock_name(deployment: str, node: int) -> str:
    """Of the lock of a deployment on one of its nodes: two of them may share a machine."""
    return f"{deployment}.{node}"


def in_words(held: Mapping[str, Any]) -> str:
    """Such as "demo is being launched by ann@desk (pid 7) since 2026-11-29T17:00:00Z, for 3 min".

    Args:
        held: the holder, as the node has it.
    """
    doing = _DOING.get(held["what"], "worked on")
    seconds = held["seconds"]
    long = f"{seconds // 60} min" if seconds >= 120 else f"{seconds} s"
    return (
        f"{held.get('deployment', 'it')} is being {doing} by {held['who']}"
        f" since {held['since']}, for {long}"
    )
