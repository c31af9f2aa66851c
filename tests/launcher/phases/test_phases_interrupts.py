"""Ctrl-C and its like: once to stop what was started, twice to let go; to a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

# Two phases; the second acts on two nodes until it is let go by a line on standard input, and so
# does cleaning up after the first. With "fail" the second fails by itself. With "early" nothing was
# started before it, with "makes" nothing but a managed environment is being made.
SCRIPT = """
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from mtppp.console import Console
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import Starts, WithoutTrace, on_each, look_at_each, run_phases

mode = sys.argv[1]
# What started the tests may have had it ignored, as nohup has.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def say(text):
    print(text, flush=True)

class Begins(Starts):
    title = "starts"
    def run(self, deployment, step):
        say("started")
    def clean_up(self, deployment):
        say("cleaning")
        on_each([0], lambda _: sys.stdin.readline())
        say("cleaned")

class Looks:
    title = "looks"
    def run(self, deployment, step):
        pass
    def clean_up(self, deployment):
        pass

class Works(WithoutTrace):
    title = "works"
    def run(self, deployment, step):
        if mode == "fail":
            raise MtpppError("it failed")
        def work(_):
            say("working")
            say("got " + sys.stdin.readline().strip())
        (look_at_each if mode == "look" else on_each)([0], work)

phases = [Looks() if mode in ("early", "makes") else Begins(), Works()]
makers = [SimpleNamespace(runs=False), SimpleNamespace(runs=True)] if mode == "makes" else []
deployment = Deployment(cluster=None, file=Path("f"), nodes=[], makers=makers)
try:
    run_phases(phases, deployment, Console())
except BaseException as error:
    say(f"raised {type(error).__name__}")
"""


class Process:
    """The script; its output line by line, its standard error at the end."""

    def __init__(self, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self, *lines: str) -> None:
        assert self._process.stdout is not None
        for line in lines:
            assert self._process.stdout.readline() == f"{line}\n"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def shows(self, text: str) -> None:
        """Wait for a line on standard error."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if text in line:
                return
        pytest.fail(f"never shown: {text}")

    def end(self) -> str:
        _, errors = self._process.communicate(timeout=60)
        return errors

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def start(mode: str) -> Process:
        started.append(Process(mode))
        return started[-1]

    yield start
    for process in started:
        process.kill()


Start = Callable[[str], Process]
STOPPING = "stopping what was started; interrupt once more to leave it as it is"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_once_waits_for_what_is_under_way_and_cleans_up(
    start: Start, number: signal.Signals
) -> None:
    process = start("act")
    process.says("started", "working")
    process.send(number)
    process.shows(STOPPING)
    process.write("end of work")
    process.says("got end of work", "cleaning")
    process.write("go on")
    process.says("cleaned", "raised KeyboardInterrupt")


def test_what_changes_nothing_is_not_waited_for(start: Start) -> None:
    process = start("look")
    process.says("started", "working")
    process.send(signal.SIGINT)
    process.says("cleaning")


@pytest.mark.parametrize(
    ("what", "meanwhile", "second"),
    [("fail", "cleaning", signal.SIGINT), ("act", "working", signal.SIGTERM)],
)
def test_twice_lets_go(start: Start, what: str, meanwhile: str, second: signal.Signals) -> None:
    process = start(what)
    process.says("started", meanwhile)
    process.send(signal.SIGINT)
    process.shows(STOPPING)
    process.send(second)
    process.says("raised Detached")


def test_once_while_cleaning_up_after_a_failure_goes_on_with_it(start: Start) -> None:
    process = start("fail")
    process.says("started", "cleaning")
    process.send(signal.SIGINT)
    process.shows(STOPPING)
    process.write("go on")
    process.says("cleaned", "raised MtpppError")


def test_nothing_is_said_of_stopping_before_anything_was_started(start: Start) -> None:
    process = start("early")
    process.says("working")
    process.send(signal.SIGINT)
    process.write("end of work")
    process.says("got end of work", "raised KeyboardInterrupt")
    assert STOPPING not in process.end()


def test_an_environment_that_is_being_made_is_stopped(start: Start) -> None:
    process = start("makes")
    process.says("working")
    process.send(signal.SIGINT)
    process.shows(STOPPING)
    process.write("end of work")
    process.says("got end of work", "raised KeyboardInterrupt")
