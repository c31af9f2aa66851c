"""The keys that ssh offers to a server: from files, and from the agent at SSH_AUTH_SOCK."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from mtppp.hosts.known_hosts import fingerprint
from mtppp.hosts.ssh_config import Endpoint

_OPENSSH_BEGIN = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_OPENSSH_END = b"-----END OPENSSH PRIVATE KEY-----"
_OPENSSH_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True, slots=True)
class Identity:
    """A key that can be offered.

    Attributes:
        label: where it is from, and its fingerprint; for messages.
    """

    key: paramiko.PKey
    label: str


@dataclass(frozen=True, slots=True)
class Identities:
    """What there is to offer, in order, and what is missing.

    Attributes:
        locked: encrypted key files that no agent holds: only a person could unlock them.
        unusable: why other key files cannot be offered.
    """

    usable: tuple[Identity, ...]
    locked: tuple[Path, ...]
    unusable: tuple[str, ...]


def find_identities(endpoint: Endpoint, agent_keys: Sequence[paramiko.AgentKey]) -> Identities:
    """Configured key files first, then the rest of the agent's keys, then the default files.

    Servers close the connection after a few refused keys, so the likeliest go first.
    """
    usable: list[Identity] = []
    locked: list[Path] = []
    unusable: list[str] = []

    def add_file(path: Path) -> None:
        try:
            identity = _from_file(path, agent_keys)
        except _LockedError:
            locked.append(path)
        except (OSError, ValueError, TypeError, paramiko.SSHException) as error:
            unusable.append(f"{path}: {_reason(error)}")
        except paramiko.pkey.UnknownKeyType:
            unusable.append(f"{path}: a type of key that is not supported without an agent")
        else:
            usable.append(identity)

    for path in endpoint.identity_files:
        add_file(path)
    if not endpoint.identities_only:
        usable += [_from_agent(key) for key in agent_keys]
    for path in endpoint.default_keys:
        if path.is_file():
            add_file(path)
    # An agent's key that is also a configured file is in there twice, under the same label.
    distinct = {identity.label: identity for identity in usable}
    return Identities(tuple(distinct.values()), tuple(locked), tuple(unusable))


class _LockedError(Exception):
    """The key file is encrypted."""


def _from_file(path: Path, agent_keys: Sequence[paramiko.AgentKey]) -> Identity:
    """A key file's key, by way of the agent if that holds it."""
    content = path.read_bytes()
    public = _public_part(path, content)
    for key in agent_keys:
        if public is not None and key.blob == public:
            return _from_agent(key)
    if _public_line(content) is not None:
        raise ValueError("a public key whose private key no agent holds")
    if _is_encrypted(content):
        raise _LockedError
    loaded = paramiko.PKey.from_path(path)
    return Identity(loaded, f"{path} {fingerprint(loaded.asbytes())}")


def _from_agent(key: paramiko.AgentKey) -> Identity:
    return Identity(key, f"agent's {key.comment or key.get_name()} {fingerprint(key.blob)}")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _public_part(path: Path, content: bytes) -> bytes | None:
    """The public key that belongs to a key file, which may itself be public."""
    beside = path.with_name(path.name + ".pub")
    for text in (content, beside.read_bytes() if beside.is_file() else b""):
        blob = _public_line(text)
        if blob is not None:
            return blob
    body = _openssh_body(content)
    if body is None:
        return None
    for _ in ("cipher", "key derivation", "its options"):
        body.get_binary()
    body.get_int()
    return body.get_binary()


def _public_line(text: bytes) -> bytes | None:
    fields = text.split()
    if len(fields) < 2 or fields[0].startswith(b"-"):
        return None
    try:
        return base64.b64decode(fields[1], validate=True)
    except binascii.Error:
        return None


def _is_encrypted(content: bytes) -> bool:
    body = _openssh_body(content)
    if body is not None:
        return body.get_binary() != b"none"
    return b"Proc-Type: 4,ENCRYPTED" in content or b"BEGIN ENCRYPTED PRIVATE KEY" in content


def _openssh_body(content: bytes) -> paramiko.Message | None:
    """A private key in OpenSSH's own format, from its cipher's name on; None in other formats."""
    _, begin, rest = content.partition(_OPENSSH_BEGIN)
    encoded, _, _ = rest.partition(_OPENSSH_END)
    if not begin:
        return None
    body = base64.b64decode(encoded)
    return paramiko.Message(body.removeprefix(_OPENSSH_MAGIC))
