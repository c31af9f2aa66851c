"""Running steps in order, and cleaning up after the one that failed."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtppp.cluster import Cluster
from mtppp.console import Console, Step
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace, on_each, run_phases

CLUSTER = cast(Cluster, SimpleNamespace(name="demo"))
DEPLOYMENT = Deployment(cluster=CLUSTER, file=Path("cluster.yaml"), nodes=[])


@dataclass
class Recorded:
    """A phase that writes down what is asked of it, and fails if it is told to."""

    title: str
    events: list[str] = field(repr=False)
    fails: BaseException | None = None
    fails_to_clean_up: BaseException | None = None

    def run(self, deployment: Deployment, step: Step) -> None:
        self.events.append(f"run {self.title}")
        step.note = f"note of {self.title}"
        if self.fails is not None:
            raise self.fails

    def clean_up(self, deployment: Deployment) -> None:
        self.events.append(f"clean up {self.title}")
        if self.fails_to_clean_up is not None:
            raise self.fails_to_clean_up


def run(*phases: Any) -> None:
    run_phases(phases, DEPLOYMENT, Console())


def test_phases_run_in_order_and_nothing_is_cleaned_up_when_all_is_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events: list[str] = []
    run(Recorded("a", events), Recorded("b", events))
    assert events == ["run a", "run b"]
    shown = re.sub(r"\d+\.\d", "N", capsys.readouterr().err)
    assert shown == (
        "  ✓ a              note of a  (N s)\n"
        "  ✓ b              note of b  (N s)\n"
    )  # fmt: skip


def test_nothing_follows_a_phase_that_finished_the_matter() -> None:
    class Finishes(Recorded):
        def run(self, deployment: Deployment, step: Step) -> None:
            super().run(deployment, step)
            deployment.finished = True

    events: list[str] = []
    deployment = replace(DEPLOYMENT)
    run_phases([Finishes("a", events), Recorded("b", events)], deployment, Console())
    assert events == ["run a"]


@pytest.mark.parametrize(
    "failure", [MtpppError("failed"), ConfigurationError("bad"), OSError("x"), KeyboardInterrupt()]
)
def test_those_begun_are_cleaned_up_in_reverse_whatever_it_was(
    failure: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []
    with pytest.raises(type(failure)) as raised:
        run(Recorded("a", events), Recorded("b", events, failure), Recorded("c", events))
    assert raised.value is failure
    assert events == ["run a", "run b", "clean up b", "clean up a"]
    assert "✗ b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("second", "shown"),
    [
        (MtpppError("h: second", details=["why"], hint="what to do"), "error: h: second\n"),
        (ValueError("second"), "error: cleaning up after 'c': ValueError('second')\n"),
    ],
)
def test_the_first_error_wins_and_cleaning_up_goes_on(
    second: Exception, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []
    first = MtpppError("first")
    with pytest.raises(MtpppError) as raised:
        run(Recorded("a", events), Recorded("c", events, first, fails_to_clean_up=second))
    assert raised.value is first
    assert events == ["run a", "run c", "clean up c", "clean up a"]
    said = capsys.readouterr().err
    assert shown in said
    assert said.endswith("what was started may still run there: `mtppp stop demo` ends it\n")


def test_a_host_that_is_gone_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, *gone = (MtpppError(message) for message in ("first", "b: gone", "b: gone"))
    a, b = (Recorded(title, [], fails_to_clean_up=e) for title, e in zip("ab", gone, strict=True))
    with pytest.raises(MtpppError, match="first"):
        run(a, b, Recorded("c", [], first))
    assert capsys.readouterr().err.count("error: b: gone\n") == 1


def test_a_second_interrupt_ends_cleaning_up() -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(
            Recorded("a", events),
            Recorded("b", events, MtpppError("x"), fails_to_clean_up=KeyboardInterrupt()),
        )
    assert events == ["run a", "run b", "clean up b"]


def test_a_phase_without_trace_has_nothing_to_undo() -> None:
    assert WithoutTrace().clean_up(DEPLOYMENT) is None  # type: ignore[func-returns-value]


def test_on_each_does_all_at_once() -> None:
    together = threading.Barrier(3, timeout=20)
    on_each([1, 2, 3], lambda _: together.wait() and None)
    on_each([], lambda _: pytest.fail("there is nothing to do"))


def test_on_each_raises_the_first_in_order_with_the_others_among_its_details() -> None:
    last_failed = threading.Event()

    def act(item: int) -> None:
        if item == 1:
            last_failed.wait(20)
        if item == 3:
            last_failed.set()
        if item != 2:
            raise MtpppError(f"error {item}", details=[f"detail {item}"], hint=f"hint {item}")

    with pytest.raises(MtpppError) as raised:
        on_each([1, 2, 3], act)
    assert raised.value.message == "error 1"
    assert raised.value.hint == "hint 1"
    assert raised.value.details == ("detail 1", "also error 3", "  hint: hint 3")


def test_on_each_gives_the_same_hint_once() -> None:
    def act(item: int) -> None:
        raise MtpppError(f"error {item}", hint=hints[item])

    hints = ["look there", "look there", "", "type this:\n$ ls"]
    with pytest.raises(MtpppError) as raised:
        on_each(range(4), act)
    assert raised.value.details == (
        *("also error 1", "also error 2", "also error 3"),
        *("  hint: type this:", "$ ls"),
    )


def test_on_each_hides_no_mistake_of_ours() -> None:
    with pytest.raises(ZeroDivisionError):
        on_each([0], lambda item: 1 // item and None)


def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    text = r"[red]not markup[/] :x: a\[b] \\ 127.0.0.1::1"
    console.say(text)
    console.error(MtpppError(text, details=[text], hint=text))
    with console.step("a") as step:
        step.progress(text)
        step.progress(text)
        step.note = text
    shown = re.sub(r"\d+\.\d s", "N s", capsys.readouterr().err)
    assert shown == (
        f"{text}\n"
        f"error: {text}\n"
        f"  │ {text}\n"
        f"hint: {text}\n"
        f"  … a              {text}\n"
        f"  ✓ a              {text}  (N s)\n"
    )
