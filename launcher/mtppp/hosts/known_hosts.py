"""Host keys as OpenSSH keeps them: known_hosts files, and what they say about a key."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha1, sha256
from pathlib import Path

_REVOKED = "@revoked"
_AUTHORITY = "@cert-authority"


class Standing(Enum):
    """What known_hosts says about the key a host presents."""

    TRUSTED = "trusted"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a known_hosts file.

    Attributes:
        marker: "", "@revoked" or "@cert-authority".
        names: the host patterns, or the one hashed name, it holds for.
        origin: path:line.
    """

    marker: str
    names: str
    key_type: str
    blob: bytes
    origin: str

    def applies_to(self, name: str) -> bool:
        if self.names.startswith("|1|"):
            return _hash_matches(self.names, name)
        return matches_patterns(self.names.lower().split(","), name)


class KnownHosts:
    """The keys of several known_hosts files together."""

    def __init__(self, keys: Iterable[KnownKey]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> KnownHosts:
        """Read those of `paths` that exist. Lines that make no sense are passed over.

        Raises:
            OSError: a file exists and cannot be read.
        """
        return cls(key for path in paths if path.is_file() for key in _parsed(path))

    def key_types(self, names: Sequence[str]) -> list[str]:
        """The types of the keys known for a host, each once, in the order of the files."""
        known = (key for name in names for key in self._of(name))
        return list(dict.fromkeys(key.key_type for key in known))

    def judge(
        self, names: Sequence[str], key_type: str, blob: bytes
    ) -> tuple[Standing, list[KnownKey]]:
        """What the files say about a key, and the lines that say so.

        Args:
            names: the host's own name first; those after it may vouch for a key, but a different
                key under them is no alarm.
        """
        same = [k for k in self._keys if k.key_type == key_type and k.blob == blob]
        revoked = [
            k for k in same if k.marker == _REVOKED and any(k.applies_to(name) for name in names)
        ]
        if revoked:
            return Standing.REVOKED, revoked
        for name in names:
            vouching = [k for k in self._of(name) if k in same]
            if vouching:
                return Standing.TRUSTED, vouching
        others = self._of(names[0])
        if others:
            return Standing.CHANGED, others
        return Standing.UNKNOWN, []

    def trusts_authority_for(self, name: str) -> bool:
        """Whether a certificate authority is trusted to vouch for the host."""
        return any(key.marker == _AUTHORITY and key.applies_to(name) for key in self._keys)

    def _of(self, name: str) -> list[KnownKey]:
        return [key for key in self._keys if not key.marker and key.applies_to(name)]


def matches_patterns(patterns: Iterable[str], name: str) -> bool:
    """Whether a name matches one of OpenSSH's patterns, and none that is negated with `!`."""
    matched = False
    for pattern in patterns:
        if _glob_matches(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched


def recorded_name(host: str, port: int) -> str:
    """The name under which known_hosts has a host."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """The SHA256 fingerprint of a public key, as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(sha256(blob).digest()).decode().rstrip("=")


def _parsed(path: Path) -> Iterable[KnownKey]:
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
        marker, *fields = ["", *line.split()]
        if fields and fields[0].startswith("@"):
            marker, *fields = fields
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        names, key_type, encoded = fields[:3]
        try:
            blob = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            continue
        yield KnownKey(marker, names, key_type, blob, f"{path}:{number}")


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        expected = base64.b64decode(digest)
        return hmac.digest(base64.b64decode(salt), name.encode(), sha1) == expected
    except (ValueError, binascii.Error):
        return False


def _glob_matches(pattern: str, name: str) -> bool:
    """Match as OpenSSH does: only * and ? are special, and brackets are themselves."""
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None
