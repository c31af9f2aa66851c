"""What befalls a deployment on n1 and n2 of the lab, and what `mtppp status` says then."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deployments import mtppp
from lab_driver import Lab

HOSTS = ("n1", "n2")
NOTICED = 300.0
"""Seconds in which `status` must tell; vLLM's and Ray's own take most of it on a busy machine."""


@dataclass(frozen=True)
class Harm:
    """One harm.

    Attributes:
        what: in words.
        do: does it.
        state: what `status` calls the deployment then.
        told: what its explanation must name.
        reached: whether both hosts still can be.
    """

    what: str
    do: Callable[[Lab], None]
    state: str
    told: tuple[str, ...]
    reached: bool = True


@dataclass
class Seen:
    """What `status` said; `sees` has every change of state with its second after the harm."""

    state: str = ""
    explanation: str = ""
    sees: list[tuple[float, str, str]] = field(default_factory=list)


def signalled(host: str, number: str, pattern: str) -> Callable[[Lab], None]:
    """Signal what has the pattern in its command line, of which a character stands in brackets:
    so the command itself has it not."""

    def send(lab: Lab) -> None:
        lab.output(host, "pkill", f"-{number}", "-f", pattern)

    return send


WORKER = "ray::[R]ayWorkerProc"

HARMS: Mapping[str, Harm] = {
    "server": Harm(
        "the API server is killed",
        signalled("n1", "KILL", "[v]llm.entrypoints.cli.main"),
        "broken",
        ("server on n1 has ended",),
    ),
    "engine": Harm(
        "EngineCore is killed",
        signalled("n1", "KILL", "VLLM::[E]ngineCore"),
        "broken",
        ("server on n1 has ended",),
    ),
    "worker": Harm(
        "the last rank is killed",
        signalled("n2", "KILL", WORKER),
        "broken",
        ("server on n1 has ended", "rank 1 on n2 has ended"),
    ),
    "raylet": Harm(
        "the second host's raylet is killed",
        signalled("n2", "KILL", "[r]aylet/raylet"),
        "broken",
        ("ray on n2 has ended", "rank 1 on n2 has ended"),
    ),
    "gcs": Harm(
        "Ray's GCS is killed",
        signalled("n1", "KILL", "[g]cs/gcs_server"),
        "broken",
        ("ray on n1 has ended",),
    ),
    "host": Harm(
        "the second host dies",
        lambda lab: lab.kill("n2"),
        "broken",
        ("n2 could not be asked",),
        reached=False,
    ),
    "suspended": Harm(
        "the last rank is stopped with SIGSTOP",
        signalled("n2", "STOP", WORKER),
        "hung",
        ("the server says it is healthy, but", "n2: suspended: "),
    ),
}


def wait_until_told(name: str, harm: Harm) -> Seen:
    """Ask for the status until it says what has happened."""
    seen = Seen()
    began = time.monotonic()
    while time.monotonic() - began < NOTICED:
        status = json.loads(mtppp("status", name, "--json").stdout)
        now = (status["state"], status["explanation"])
        if now != (seen.state, seen.explanation):
            seen.state, seen.explanation = now
            seen.sees.append((round(time.monotonic() - began, 1), *now))
        if seen.state == harm.state and all(part in seen.explanation for part in harm.told):
            return seen
    raise AssertionError(f"{harm.what}: {seen.sees}")


def left(lab: Lab) -> dict[str, list[str]]:
    """Processes with our mark, and shared memory, on hosts where there are any."""
    look = "grep -lz ^MTPPP_RUN_DIR= /proc/[0-9]*/environ 2>/dev/null; ls -d /dev/shm/* 2>/dev/null"
    found: dict[str, list[str]] = {
        host: lab.output(host, "sh", "-c", f"{look}; true").split() for host in HOSTS
    }
    return {host: what for host, what in found.items() if what}


def running_line(said: str) -> str:
    """What a launch said of what runs, of its line `✓ running  NOTE  (1.2 s)`."""
    [line] = [line for line in said.splitlines() if line[2:].startswith("✓ running")]
    return line.split(None, 2)[2].rpartition("  (")[0]
