from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sshd_server import Sshd, make_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of the test's own, and no agent: nothing of the developer's counts."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture(scope="session")
def client_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("client") / "id_ed25519")


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory, client_key: Path) -> Iterator[Sshd]:
    """A server with two host keys, of which its known_hosts has the ed25519 one."""
    directory = tmp_path_factory.mktemp("sshd") / "server"
    server = Sshd(directory, client_key, host_keys=("ed25519", "ecdsa"))
    yield server
    server.stop()


@pytest.fixture
def start_sshd(tmp_path: Path, client_key: Path) -> Iterator[Callable[..., Sshd]]:
    """Starts servers with further sshd_config lines, for one test."""
    servers: list[Sshd] = []

    def start(settings: str = "", host_keys: tuple[str, ...] = ("ed25519",)) -> Sshd:
        directory = tmp_path / f"sshd{len(servers)}"
        servers.append(Sshd(directory, client_key, settings=settings, host_keys=host_keys))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
