"""What a person sees while steps run: one line per step, on standard error.

Readable without colour and without a terminal; `NO_COLOR` is respected. On a terminal long lines
are folded between words; elsewhere they stay whole, for whatever reads them.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.text import Text

from mtppp.errors import MtpppError

_NARROWEST = 20  # columns, below which folding helps nobody
_FEWEST_BETWEEN = 16
"""Of what is counted, between two lines that stay."""
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("?", "yellow")}


def folded(line: str) -> str:
    """A line for standard output, folded where that is a terminal."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return "\n".join(part for whole in line.split("\n") for part in _lines(whole, width))


def _lines(line: str, width: int) -> list[str]:
    """What a line becomes within a width. What is to be copied stays whole: a word that is longer,
    and a command on a line of its own, which begins with "$ "."""
    if line.lstrip(" │").startswith("$ "):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    lines = textwrap.wrap(
        line,
        max(width, _NARROWEST),
        subsequent_indent=indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [line]


def _even_if_the_terminal_is_gone() -> suppress:
    """That must not end what is under way, nor keep it from being cleaned up."""
    return suppress(OSError)


class Step:
    """The step that is running; `note` is shown behind its title.

    Attributes:
        succeeded: what its mark says once it has run to its end; None when that decides nothing.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self.title = title
        self.note = ""
        self.succeeded: bool | None = True

    def progress(self, text: str) -> None:
        """Say what is happening right now; on a terminal it replaces what was said before."""
        self._console.show_progress(self.title, text)

    def count(self, what: str, finished: int, of: int) -> None:
        """Say how much is done. Without a terminal, where each line stays, only at each quarter,
        and of a few things only at the end."""
        every = max(_FEWEST_BETWEEN, -(-of // 4))
        if self._console.replaces_lines or finished == of or finished % every == 0:
            self.progress(f"{what}: {finished} of {of}")


class Console:
    """Prints steps and errors to standard error."""

    def __init__(self) -> None:
        self._rich = RichConsole(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        self._status = self._rich.status("") if self._rich.is_terminal else None
        self._said = ""

    @property
    def replaces_lines(self) -> bool:
        """Whether what is said while a step runs takes the place of what was said before."""
        return self._status is not None

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step: its title while it runs, then one line with what came of it and how long."""
        step = Step(self, title)
        started = time.monotonic()
        self.show_progress(title, "")
        try:
            yield step
        except BaseException:
            self._end(False, step, started)
            raise
        self._end(step.succeeded, step, started)

    def show_progress(self, title: str, text: str) -> None:
        line = f"{title:<14} {text}".rstrip()
        if self._status is not None:
            self._status.update(Text(line))
            self._status.start()
        elif text and text != self._said:
            self._print(f"  … {escape(line)}")
        self._said = text

    def _end(self, succeeded: bool | None, step: Step, started: float) -> None:
        mark, colour = _MARKS[succeeded]
        if self._status is not None:
            with _even_if_the_terminal_is_gone():
                self._status.stop()
        seconds = time.monotonic() - started
        self._print(
            f"  [{colour}]{mark}[/] {step.title:<14} {escape(step.note)}"
            f"{'  ' if step.note else ''}[dim]({seconds:.1f} s)[/]"
        )

    def _print(self, text: str) -> None:
        with _even_if_the_terminal_is_gone():
            self._rich.print(self._folded(Text.from_markup(text, emoji=False)))

    def _folded(self, text: Text) -> Text:
        if not self._rich.is_terminal:
            return text
        parts: list[Text] = []
        for whole in text.split("\n"):
            at = 0
            for line in _lines(whole.plain, self._rich.width):
                words = line.lstrip() if at else line
                start = whole.plain.index(words, at)
                at = start + len(words)
                parts.append(Text(line[: len(line) - len(words)]) + whole[start:at])
        return Text("\n").join(parts)

    def say(self, text: str) -> None:
        """One line, as it is."""
        self._print(escape(text))

    def error(self, error: MtpppError) -> None:
        """An error as a person needs it: what and where, the lines that matter, what to do."""
        self._print(f"[bold red]error:[/] {escape(error.message)}")
        for line in error.details:
            self._print(f"  [dim]│[/] {escape(line)}")
        if error.hint:
            self._print(f"[bold]hint:[/] {escape(error.hint)}")
