"""The way to a host: what was asked for explicitly, then what the OpenSSH client's file says.

paramiko reads such files too, but knows no Include and lets `Match exec` read our stdin.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtppp.errors import ConnectFailed
from mtppp.hosts.known_hosts import matches_patterns, recorded_name

_SETTING = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+)")
_HOP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[.+\]|[^\[\]:]+)(?::(?P<port>\d+))?/?"
)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SETTINGS_USED = {
    "connecttimeout",
    "hostkeyalias",
    "hostname",
    "identitiesonly",
    "identityfile",
    "port",
    "proxycommand",
    "proxyjump",
    "serveraliveinterval",
    "user",
    "userknownhostsfile",
}
_INCLUDE_DEPTH = 16
_JUMP_DEPTH = 8
_MATCH_EXEC_TIMEOUT = 30.0

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
        identity_files: key files that were asked for, offered before the agent's other keys.
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

    @property
    def recorded_names(self) -> tuple[str, ...]:
        """The names under which known_hosts may have it. The first is the one to record it by."""
        if self.host_key_alias:
            return (self.host_key_alias.lower(),)
        own = recorded_name(self.hostname, self.port)
        without_port = recorded_name(self.hostname, _SSH_PORT)
        return tuple(dict.fromkeys((own, without_port)))


def resolve_route(target: SshTarget) -> tuple[Endpoint, ...]:
    """The SSH servers to go through, the target last.

    Raises:
        ConnectFailed: the OpenSSH client's file is missing, invalid or beyond what is supported.
    """
    path = (target.config_file or Path("~/.ssh/config")).expanduser()
    required = target.config_file is not None
    given = {
        "user": target.user,
        "port": target.port,
        "proxyjump": target.proxy_jump,
    }
    try:
        resolver = _Resolver(target, path if required or path.exists() else None)
        return resolver.route(target.host, given)
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        raise ConnectFailed(
            target.host,
            f"cannot find the way from {path}: {error}",
            hint="Mend the file, or give another as ssh.config_file.",
        ) from error


class _Resolver:
    def __init__(self, target: SshTarget, path: Path | None) -> None:
        self._target = target
        self._path = path

    def route(self, host: str, given: Mapping[str, object], depth: int = 0) -> tuple[Endpoint, ...]:
        """The servers to go through to `host`, by its own ProxyJump and that of the first hop."""
        if depth > _JUMP_DEPTH:
            raise ValueError(f"ProxyJump of {host} goes in circles")
        options = self._options(host, given)
        # Whichever of the two comes first counts.
        proxy = next((name for name in options.values if name in ("proxyjump", "proxycommand")), "")
        value = options.expanded(proxy)
        if not value or value.lower() == "none":
            return (self._endpoint(options),)
        if proxy == "proxycommand":
            return (self._endpoint(options, proxy_command=value),)
        first, *others = (_hop(text.strip()) for text in value.split(","))
        return (
            *self.route(*first, depth=depth + 1),
            *(self._endpoint(self._options(*other)) for other in others),
            self._endpoint(options),
        )

    def _options(self, host: str, given: Mapping[str, object]) -> _Options:
        options = _Options(host, given)
        if self._path is not None:
            options.read(self._path)
            if options.has_final_match:
                options.final = True
                options.read(self._path)
        return options

    def _endpoint(self, options: _Options, proxy_command: str | None = None) -> Endpoint:
        asked = _seconds(options.get("connecttimeout")) or _CONNECT_TIMEOUT
        interval = _seconds(options.get("serveraliveinterval")) or _KEEPALIVE_INTERVAL
        identity_files = self._identity_files(options)
        default_keys = () if identity_files else tuple(_home_ssh(key) for key in _DEFAULT_KEYS)
        return Endpoint(
            name=options.host,
            hostname=options.hostname,
            port=int(options.port),
            user=options.user,
            host_key_alias=options.get("hostkeyalias") or None,
            known_hosts=self._known_hosts(options),
            identity_files=identity_files,
            default_keys=default_keys,
            identities_only=options.get("identitiesonly").lower() == "yes",
            connect_timeout=self._target.connect_timeout or asked,
            keepalive_interval=min(interval, _KEEPALIVE_INTERVAL),
            proxy_command=proxy_command,
        )

    def _identity_files(self, options: _Options) -> tuple[Path, ...]:
        configured = options.paths("identityfile")
        if self._target.identity_file is None:
            return configured
        given = self._target.identity_file.expanduser()
        return (given,) if options.host == self._target.host else (*configured, given)

    def _known_hosts(self, options: _Options) -> tuple[Path, ...]:
        if self._target.known_hosts is not None:
            return (self._target.known_hosts.expanduser(),)
        if "userknownhostsfile" in options.values:
            return (*options.paths("userknownhostsfile"), _SYSTEM_KNOWN_HOSTS)
        return (_home_ssh("known_hosts"), _home_ssh("known_hosts2"), _SYSTEM_KNOWN_HOSTS)


class _Options:
    """The settings that hold for one host: for each, the first value that is found.

    Attributes:
        host: as it was asked for.
        values: the words of each setting, in the order in which the settings were found.
        final: whether this is the second pass, in which `Match final` holds.
    """

    def __init__(self, host: str, given: Mapping[str, object]) -> None:
        self.host = host
        self.values = {name: [str(value)] for name, value in given.items() if value is not None}
        self.final = False
        self.has_final_match = False

    def get(self, name: str) -> str:
        return next(iter(self.values.get(name, ())), "")

    @property
    def hostname(self) -> str:
        return self.get("hostname").replace("%h", self.host).replace("%%", "%") or self.host

    @property
    def port(self) -> str:
        return self.get("port") or str(_SSH_PORT)

    @property
    def user(self) -> str:
        return self.get("user") or _account().pw_name

    def expanded(self, name: str) -> str:
        return self._with_tokens(self.get(name))

    def paths(self, name: str) -> tuple[Path, ...]:
        words = self.values.get(name, ())
        given = (word for word in words if word.lower() not in ("none", os.devnull))
        return tuple(Path(self._with_tokens(word)).expanduser() for word in given)

    def read(self, path: Path, *, active: bool = True, depth: int = 0) -> None:
        """Take in the settings of a file.

        Args:
            active: whether the block that includes the file holds. A file's own blocks hold only
                if that does; after an Include, the block that it is in goes on.
        """
        if depth > _INCLUDE_DEPTH:
            raise ValueError(f"Include is nested more than {_INCLUDE_DEPTH} deep at {path}")
        holds = active
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
            setting = _SETTING.match(line)
            if setting is None:
                continue
            keyword, value = setting[1].lower(), setting[2].strip()
            try:
                if keyword == "host":
                    holds = active and matches_patterns(_words(value), self._current_host)
                elif keyword == "match":
                    holds = active and self._matches(_words(value))
                elif keyword == "include":
                    for included in _included(_words(value)):
                        self.read(included, active=holds, depth=depth + 1)
                elif holds and keyword in _SETTINGS_USED:
                    self._take(keyword, value)
            except ValueError as error:
                raise ValueError(f"line {number} of {path}: {error}") from error

    @property
    def _current_host(self) -> str:
        return self.hostname if self.final else self.host

    def _take(self, keyword: str, value: str) -> None:
        # A ProxyCommand goes to a shell as it is written.
        words = [value] if keyword == "proxycommand" else _words(value)
        if keyword == "identityfile":
            known = self.values.setdefault(keyword, [])
            known += [word for word in words if word not in known]
        else:
            self.values.setdefault(keyword, words)

    def _matches(self, words: Sequence[str]) -> bool:
        """Whether the criteria of a Match line hold. Those after one that does not don't count."""
        remaining = iter(words)
        for word in remaining:
            criterion = word.removeprefix("!").lower()
            if self._holds(criterion, remaining) is word.startswith("!"):
                return False
        return True

    def _holds(self, criterion: str, arguments: Iterator[str]) -> bool:
        if criterion == "all":
            return True
        if criterion == "canonical":
            return False
        if criterion == "final":
            self.has_final_match = True
            return self.final
        argument = next(arguments, "")
        if criterion == "exec":
            return self._succeeds(argument)
        subjects = {
            "host": self.hostname,
            "originalhost": self.host,
            "user": self.user,
            "localuser": _account().pw_name,
        }
        if criterion not in subjects:
            raise ValueError(f"`Match {criterion}` is not supported")
        return matches_patterns(argument.split(","), subjects[criterion])

    def _succeeds(self, command: str) -> bool:
        completed = subprocess.run(
            ["/bin/sh", "-c", self._with_tokens(command)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_MATCH_EXEC_TIMEOUT,
        )
        return completed.returncode == 0

    def _with_tokens(self, text: str) -> str:
        def value(token: re.Match[str]) -> str:
            try:
                return tokens[token[1]]
            except KeyError:
                raise ValueError(f"{token[0]} in {text!r} is not supported") from None

        tokens = {
            "%": "%",
            "d": str(Path.home()),
            "h": self.hostname,
            "i": str(os.getuid()),
            "k": self.get("hostkeyalias") or self.host,
            "L": socket.gethostname().partition(".")[0],
            "l": socket.gethostname(),
            "n": self.host,
            "p": self.port,
            "r": self.user,
            "u": _account().pw_name,
        }
        return re.sub("%(.?)", value, text)


def _account() -> pwd.struct_passwd:
    return pwd.getpwuid(os.getuid())


def _home_ssh(name: str) -> Path:
    return Path.home() / ".ssh" / name


def _words(value: str) -> list[str]:
    return shlex.split(value, comments=True)


def _seconds(value: str) -> float:
    """A time as OpenSSH writes them: 90, 90s, 1m30s; 0 for none."""
    if not value or value.lower() == "none":
        return 0
    if not re.fullmatch(r"(\d+[smhdw]?)+", value.lower()):
        raise ValueError(f"{value!r} is not a time")
    parts = re.findall(r"(\d+)([smhdw]?)", value.lower())
    return sum(int(count) * _SECONDS[unit] for count, unit in parts)


def _hop(text: str) -> tuple[str, dict[str, object]]:
    parts = _HOP.fullmatch(text)
    if parts is None:
        raise ValueError(f"ProxyJump {text!r} is not [user@]host[:port]")
    return parts["host"].strip("[]"), {"user": parts["user"], "port": parts["port"]}


def _included(patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        path = Path.home() / ".ssh" / Path(pattern).expanduser()
        found = sorted(glob.glob(str(path)))  # noqa: PTH207 - a Path globs no absolute pattern
        yield from filter(Path.is_file, map(Path, found))
