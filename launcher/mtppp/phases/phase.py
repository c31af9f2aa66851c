"""What a step is, and running steps in order: on failure what was started is cleaned up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from mtppp.console import Console, Step
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment

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


class WithoutTrace:
    """For phases that leave nothing behind."""

    def clean_up(self, deployment: Deployment) -> None:
        """Nothing to undo."""


def run_phases(phases: Sequence[Phase], deployment: Deployment, console: Console) -> None:
    """Run phases in order, until the last or until one has set `finished`.

    When one fails, those begun are cleaned up in reverse, and its error is raised. What goes wrong
    while cleaning up is shown, and does not hide the first error.
    """
    begun: list[Phase] = []
    try:
        for phase in phases:
            begun.append(phase)
            with console.step(phase.title) as step:
                phase.run(deployment, step)
            if deployment.finished:
                return
    except BaseException:
        for phase in reversed(begun):
            try:
                phase.clean_up(deployment)
            except MtpppError as error:
                console.error(error)
            except Exception as error:  # the other phases are to be cleaned up, too
                console.error(MtpppError(f"cleaning up after {phase.title!r}: {error!r}"))
        raise


def on_each(items: Sequence[T], action: Callable[[T], None]) -> None:
    """Do the same on several hosts at once; one failure is raised as it is, several together.

    Raises:
        MtpppError: of the first item in order; the others' messages are among its details.
    """
    errors: list[MtpppError] = []
    with ThreadPoolExecutor(max_workers=min(MAX_PARALLEL, len(items) or 1)) as pool:
        for future in [pool.submit(action, item) for item in items]:
            try:
                future.result()
            except MtpppError as error:
                errors.append(error)
    if not errors:
        return
    first = errors[0]
    first.details = (*first.details, *(f"also {error.message}" for error in errors[1:]))
    raise first
