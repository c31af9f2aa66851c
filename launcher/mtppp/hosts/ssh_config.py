"""The way to a host: what was asked for explicitly, then what the OpenSSH client's file says.

paramiko reads that file but knows no `Include`, so those are expanded first.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from mtppp.errors import ConnectFailed
from mtppp.hosts.known_hosts import recorded_name

_SETTING = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+)")
_HOP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[.+\]|[^\[\]:]+)(?::(?P<port>\d+))?/?"
)
_MATCH_WITHOUT_ARGUMENT = {"all", "canonical", "final"}
_MATCH_WITH_ARGUMENT = {"host", "originalhost", "user", "localuser", "exec"}
_INCLUDE_DEPTH = 16
_JUMP_DEPTH = 8

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SSH_PORT = 22
_CONNECT_TIMEOUT = 20.0
_KEEPALIVE_INTERVAL = 10.0
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")


@dataclass(frozen=True, slots=True)
class SshTarget:
    """A host to be reached by ssh, and what overrides the OpenSSH client's file.

    Attributes:
        host: a name, an address, or an alias from the file.
        identity_file: offered first, and the only key file offered to the host.
        config_file: instead of ~/.ssh/config.
        known_hosts: the only file of host keys, for the host and those jumped through.
        proxy_jump: as `ProxyJump`: one or several [user@]host[:port], comma-separated.
        connect_timeout: seconds for the host to accept a connection, and again to say that it
            speaks SSH.
    """

    host: str
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    config_file: Path | None = None
    known_hosts: Path | None = None
    proxy_jump: str | None = None
    connect_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One SSH server on the way, with everything resolved.

    Attributes:
        name: what it was asked for by.
        host_key_alias: the name known_hosts has it under, if that is not its own.
        identity_files: key files to offer; those that must exist.
        default_keys: key files to offer after the agent's keys, if they exist.
        keepalive_interval: seconds between two signs of life that are asked for.
        proxy_command: a shell command whose input and output are the connection.
    """

    name: str
    hostname: str
    port: int
    user: str
    host_key_alias: str | None
    known_hosts: tuple[Path, ...]
    identity_files: tuple[Path, ...]
    default_keys: tuple[Path, ...]
    identities_only: bool
    connect_timeout: float
    keepalive_interval: float
    proxy_command: str | None

    def __str__(self) -> str:
        address = f"{self.hostname}:{self.port}"
        return address if self.name == self.hostname else f"{self.name} ({address})"

    @property
    def recorded_names(self) -> tuple[str, ...]:
        """The names under which known_hosts may have it. The first is the one to record it by."""
        if self.host_key_alias:
            return (self.host_key_alias.lower(),)
        own = recorded_name(self.hostname, self.port)
        without_port = recorded_name(self.hostname, _SSH_PORT)
        return tuple(dict.fromkeys((own, without_port)))


@dataclass(frozen=True, slots=True)
class _Overrides:
    """Settings that win over the file's, for one host on the way."""

    user: str | None = None
    port: int | None = None
    proxy_jump: str | None = None

    def lines(self) -> list[str]:
        # The first value obtained for a setting counts, so these go before the file.
        settings = {"User": self.user, "Port": self.port, "ProxyJump": self.proxy_jump}
        return [f"{name} {value}" for name, value in settings.items() if value is not None]


def resolve_route(target: SshTarget) -> tuple[Endpoint, ...]:
    """The SSH servers to go through, the target last.

    Raises:
        ConnectFailed: the OpenSSH client's file is missing, invalid or beyond what is supported.
    """
    path = (target.config_file or Path("~/.ssh/config")).expanduser()
    try:
        lines = [] if target.config_file is None and not path.exists() else list(_expanded(path))
        overrides = _Overrides(target.user, target.port, target.proxy_jump)
        return _Resolver(target, lines).route(target.host, overrides)
    except (OSError, ValueError, KeyError, ImportError, paramiko.SSHException) as error:
        raise ConnectFailed(
            target.host,
            f"cannot find the way from {path}: {error}",
            hint="Mend the file, or give another as ssh.config_file.",
        ) from error


class _Resolver:
    def __init__(self, target: SshTarget, lines: Sequence[str]) -> None:
        self._target = target
        self._lines = lines

    def route(self, host: str, overrides: _Overrides, depth: int = 0) -> tuple[Endpoint, ...]:
        """The servers to go through to `host`, by its own ProxyJump and that of the first hop."""
        if depth > _JUMP_DEPTH:
            raise ValueError(f"ProxyJump of {host} goes in circles")
        options = self._options(host, overrides)
        proxy = next((name for name in options if name in ("proxyjump", "proxycommand")), "")
        value = options.get(proxy) or "none"
        if proxy != "proxyjump" or value.lower() == "none":
            command = value if proxy == "proxycommand" and value.lower() != "none" else None
            return (self._endpoint(host, options, proxy_command=command),)
        first, *others = (_hop(text.strip()) for text in value.split(","))
        return (
            *self.route(*first, depth=depth + 1),
            *(self._endpoint(name, self._options(name, given)) for name, given in others),
            self._endpoint(host, options),
        )

    def _options(self, host: str, overrides: _Overrides) -> paramiko.SSHConfigDict:
        text = "\n".join([*overrides.lines(), "Host *", *self._lines])
        return paramiko.SSHConfig.from_text(text).lookup(host)

    def _endpoint(
        self, name: str, options: paramiko.SSHConfigDict, proxy_command: str | None = None
    ) -> Endpoint:
        target = self._target
        asked = _seconds(options.get("connecttimeout", "none")) or _CONNECT_TIMEOUT
        interval = _seconds(options.get("serveraliveinterval", "none")) or _KEEPALIVE_INTERVAL
        identity_files = self._identity_files(name, options)
        default_keys = () if identity_files else tuple(_home_ssh(key) for key in _DEFAULT_KEYS)
        return Endpoint(
            name=name,
            hostname=options["hostname"],
            port=int(options.get("port", _SSH_PORT)),
            user=options.get("user") or pwd.getpwuid(os.getuid()).pw_name,
            host_key_alias=options.get("hostkeyalias"),
            known_hosts=self._known_hosts(options),
            identity_files=identity_files,
            default_keys=default_keys,
            identities_only=options.get("identitiesonly", "no").lower() == "yes",
            connect_timeout=target.connect_timeout or asked,
            keepalive_interval=min(interval, _KEEPALIVE_INTERVAL),
            proxy_command=proxy_command,
        )

    def _identity_files(self, name: str, options: paramiko.SSHConfigDict) -> tuple[Path, ...]:
        configured = [
            Path(value).expanduser()
            for value in options.get("identityfile", ())
            if value.lower() != "none"
        ]
        if self._target.identity_file is None:
            return tuple(configured)
        given = self._target.identity_file.expanduser()
        return (given,) if name == self._target.host else (*configured, given)

    def _known_hosts(self, options: paramiko.SSHConfigDict) -> tuple[Path, ...]:
        if self._target.known_hosts is not None:
            return (self._target.known_hosts.expanduser(),)
        if "userknownhostsfile" not in options:
            return (_home_ssh("known_hosts"), _home_ssh("known_hosts2"), _SYSTEM_KNOWN_HOSTS)
        values = shlex.split(options["userknownhostsfile"])
        own = [Path(value).expanduser() for value in values if value.lower() != "none"]
        return (*own, _SYSTEM_KNOWN_HOSTS)


def _home_ssh(name: str) -> Path:
    return Path.home() / ".ssh" / name


def _seconds(value: str) -> float:
    """A time as OpenSSH writes them: 90, 90s, 1m30s; 0 for none."""
    if value.lower() == "none":
        return 0
    if not re.fullmatch(r"(\d+[smhdw]?)+", value.lower()):
        raise ValueError(f"{value!r} is not a time")
    parts = re.findall(r"(\d+)([smhdw]?)", value.lower())
    return sum(int(count) * _SECONDS[unit] for count, unit in parts)


def _hop(text: str) -> tuple[str, _Overrides]:
    parts = _HOP.fullmatch(text)
    if parts is None:
        raise ValueError(f"ProxyJump {text!r} is not [user@]host[:port]")
    port = int(parts["port"]) if parts["port"] else None
    return parts["host"].strip("[]"), _Overrides(parts["user"], port)


def _expanded(path: Path, scope: str = "", depth: int = 0) -> Iterator[str]:
    """The lines of the file with those of the files it includes.

    An Include within a Host or Match block holds only where the block does, and the block goes
    on after it. So every block becomes a Match whose conditions start with `scope`: those of
    the blocks that the file is included in.
    """
    if depth > _INCLUDE_DEPTH:
        raise ValueError(f"Include is nested more than {_INCLUDE_DEPTH} deep at {path}")
    block = scope
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
        setting = _SETTING.match(line)
        keyword = setting[1].lower() if setting else ""
        value = setting[2].strip() if setting else ""
        if keyword in ("host", "match"):
            block = " ".join(filter(None, (scope, _conditions(keyword, value, f"{path}:{number}"))))
            yield _header(block)
        elif keyword == "include":
            for included in _included(value):
                yield from _expanded(included, block, depth + 1)
                yield _header(block)
        else:
            yield line


def _conditions(keyword: str, value: str, origin: str) -> str:
    """A Host or Match line as conditions of a Match line; "" where it always holds."""
    words = shlex.split(value)
    if keyword == "host":
        return shlex.join(["originalhost", ",".join(words)])
    conditions = []
    remaining = iter(words)
    for word in remaining:
        criterion = word.removeprefix("!").lower()
        if criterion in _MATCH_WITH_ARGUMENT:
            conditions += [word, next(remaining, "")]
        elif criterion not in _MATCH_WITHOUT_ARGUMENT:
            raise ValueError(f"{origin}: `Match {criterion}` is not supported")
        elif criterion != "all":
            conditions.append(word)
    return shlex.join(conditions)


def _header(conditions: str) -> str:
    return f"Match {conditions}" if conditions else "Host *"


def _included(value: str) -> Iterator[Path]:
    for pattern in shlex.split(value):
        path = Path.home() / ".ssh" / Path(pattern).expanduser()
        found = sorted(glob.glob(str(path)))  # noqa: PTH207 - a Path globs no absolute pattern
        yield from filter(Path.is_file, map(Path, found))
