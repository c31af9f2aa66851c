"""Drives `scripts/lab` for tests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "scripts" / "lab"
CACHE = Path(os.environ.get("MTPPP_CACHE") or Path.home() / ".cache" / "mtppp")
HOSTS = 3


@dataclass(frozen=True)
class Lab:
    """Drives `scripts/lab` for one lab; every method runs the command to its end."""

    name: str

    def do(
        self, command: str, *arguments: str, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a sub-command, whatever comes of it."""
        return subprocess.run(
            self.argv(command, *arguments),
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def argv(self, command: str, *arguments: str) -> list[str]:
        return [sys.executable, "-B", str(SCRIPT), command, "--name", self.name, *arguments]

    def must(self, command: str, *arguments: str) -> str:
        """Run a sub-command that has to succeed; return its output."""
        done = self.do(command, *arguments)
        assert done.returncode == 0, f"scripts/lab {command}: {done.stderr}"
        return done.stdout

    def up(self, count: int = HOSTS) -> None:
        cache = ["--share", str(CACHE)] if CACHE.is_dir() else []
        self.must("up", str(count), *cache)

    def down(self) -> None:
        self.must("down")

    def cut(self, host: str) -> None:
        self.must("cut", host)

    def heal(self, host: str) -> None:
        self.must("heal", host)

    def part(self, host: str, other: str) -> None:
        self.must("part", host, other)

    def kill(self, host: str) -> None:
        self.must("kill", host)

    def run(
        self, host: str, *command: str, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host over ssh."""
        return self.do("run", host, "--", *command, timeout=timeout)

    def output(self, host: str, *command: str) -> str:
        """Output of a command on a host that has to succeed."""
        done = self.run(host, *command)
        assert done.returncode == 0, f"{host}: {command}: {done.stderr}"
        return done.stdout.strip()

    def status(self) -> dict[str, Any]:
        """What `scripts/lab status --json` reports: `directory`, `ssh_config`, `hosts`, ..."""
        report: dict[str, Any] = json.loads(self.do("status", "--json").stdout)
        return report

    def hosts(self) -> dict[str, dict[str, Any]]:
        return {host["name"]: host for host in self.status()["hosts"]}

    def states(self) -> dict[str, str]:
        return {name: host["state"] for name, host in self.hosts().items()}

    @cached_property
    def ssh_config(self) -> Path:
        return Path(self.status()["ssh_config"])


def lab_name(purpose: str) -> str:
    """A name of this checkout's own, so that tests of several checkouts can run side by side."""
    return purpose + hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:6]


def require_root() -> None:
    if os.geteuid() == 0:
        return
    if os.environ.get("CI") == "true":
        pytest.fail("the lab needs root, and CI must not leave its tests out")
    pytest.skip("the lab needs root")
