"""What a step is, and running steps in order: on failure what was started is cleaned up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol, TypeVar

from mtppp.console import Console, Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.interrupts import Detached, interruptible

T = TypeVar("T")
MAX_PARALLEL = 64


class Phase(Protocol):
    """One step."""

    @property
    def title(self) -> str:
        """A word or two; the same for every run."""

    def run(self, deployment: Deployment, step: Step) -> None:
        """Do it, and leave in `step.note` what came of it."""

    def clean_up(self, deployment: Deployment) -> None:
        """Undo what `run` did, wholly or partly done; called when it or a later step failed."""


class Starts:
    """For phases that start something; left out where all of it runs already."""


class WithoutTrace:
    """For phases that leave nothing behind."""

    def clean_up(self, deployment: Deployment) -> None:
        """Nothing to undo."""


def run_phases(phases: Sequence[Phase], deployment: Deployment, console: Console) -> None:
    """Run phases in order, until the last or until one has set `finished`.

    When one fails or is interrupted, those begun are cleaned up in reverse, and its error is
    raised. What goes wrong while cleaning up is shown, and does not hide the first error. At the
    end locks are given back, with a word of what became of it.

    Raises:
        Detached: interrupted while cleaning up; what was not yet cleaned up is left as it is.
    """
    begun: list[Phase] = []

    def undoes() -> bool:
        return any(isinstance(phase, Starts) for phase in begun) or deployment.makes_environments

    with interruptible(console.say, undoes) if _in_main_thread() else nullcontext() as interrupts:
        try:
            for phase in phases:
                begun.append(phase)
                if deployment.adopted and isinstance(phase, Starts):
                    continue
                with console.step(phase.title) as step:
                    phase.run(deployment, step)
                if deployment.finished:
                    break
        except Detached:
            raise
        except BaseException as error:
            if interrupts is not None:
                interrupts.cleaning = True
            _clean_up(begun, deployment, console)
            _unlock(deployment, _outcome(error))
            raise
        _unlock(deployment, "done")


def _in_main_thread() -> bool:
    """Whether signal handlers may be set here."""
    return threading.current_thread() is threading.main_thread()


def _clean_up(begun: Sequence[Phase], deployment: Deployment, console: Console) -> None:
    # Of several phases each may fail alike: where a host is gone, all of them do.
    failed: set[str] = set()
    for phase in reversed(begun):
        try:
            phase.clean_up(deployment)
        except Exception as second:  # the other phases are to be cleaned up, too
            message = f"cleaning up after {phase.title!r}: {second!r}"
            error = second if isinstance(second, MtpppError) else MtpppError(message)
            if error.message not in failed:
                console.error(error)
            failed.add(error.message)
    if failed:
        name = deployment.cluster.name
        console.say(f"what was started may still run there: `mtppp stop {name}` ends it")


def _outcome(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"failed: {error.message if isinstance(error, MtpppError) else repr(error)}"


def _unlock(deployment: Deployment, outcome: str) -> None:
    on_each(deployment.nodes, lambda node: node.unlock(outcome))


def on_each(items: Iterable[T], action: Callable[[T], None]) -> None:
    """Do the same on several hosts at once; one failure is raised as it is, several together.

    When interrupted, what is under way is waited for: it must not happen after it was undone.

    Raises:
        MtpppError: of the first item in order; among its details are the others' messages, and what
            to do about them where that is something else.
    """
    actions = _Actions(items, action)
    try:
        actions.run()
    except Detached:
        raise
    except KeyboardInterrupt:
        actions.begin_no_more()
        raise
    actions.raise_errors()


def look_at_each(items: Iterable[T], action: Callable[[T], object]) -> None:
    """The same for what changes nothing: when interrupted, it is not waited for."""
    actions = _Actions(items, action)
    actions.run()
    actions.raise_errors()


class _Actions:
    """Actions in threads that do not keep the program from ending.

    Connections are used in these alone: an interruption, which comes to the main thread wherever
    it is, finds none of their locks held.
    """

    def __init__(self, items: Iterable[T], action: Callable[[T], object]) -> None:
        listed = list(items)
        self._errors: list[BaseException | None] = [None] * len(listed)
        self._act: Callable[[int], object] = lambda index: action(listed[index])
        self._waiting = list(reversed(range(len(listed))))
        self._under_way = 0
        self._changed = threading.Condition()

    def run(self) -> None:
        """Begin all, and wait for all. An interruption ends the wait and nothing else."""
        for _ in range(min(MAX_PARALLEL, len(self._waiting))):
            threading.Thread(target=self._work, daemon=True).start()
        # Not by joining the threads: in Python 3.11 one whose join was interrupted counts as ended.
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._under_way)

    def begin_no_more(self) -> None:
        """Wait for those that were begun."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._under_way)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                index = self._waiting.pop()
                self._under_way += 1
            try:
                self._act(index)
            except BaseException as error:  # raised where it is waited for
                self._errors[index] = error
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def raise_errors(self) -> None:
        """Raise what went wrong; a mistake of ours first."""
        errors = [error for error in self._errors if error is not None]
        known = [error for error in errors if isinstance(error, MtpppError)]
        for error in errors:
            if not isinstance(error, MtpppError):
                raise error
        if known:
            first, *others = known
            first.details = (*first.details, *with_hints(others, known=first.hint))
            raise first


def with_hints(errors: Iterable[MtpppError], *, known: str) -> Iterator[str]:
    """Further errors, for the details of one whose hint is `known`."""
    for error in errors:
        yield f"also {error.message}"
        if error.hint not in ("", known):
            yield from f"  hint: {error.hint}".splitlines()
