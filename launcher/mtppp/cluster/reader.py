"""YAML text to plain values, with the line of each and none of YAML's surprises.

The file is read as mappings, lists, text, whole numbers, decimals, true, false and empty.
What YAML readers disagree about, or what hides where a value comes from, is refused: duplicate
keys, anchors, aliases and merge keys, tags, several documents, yes/no/on/off without quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml
from yaml.reader import ReaderError

from mtppp.cluster.source import KeyPath, Problem, shorten

MAX_DEPTH = 20

# No other spelling is a number: 0755, 1_000, 0x1F and 12:30 mean different things to different
# readers and stay text, and so does what is too long to be a size, a port or a count.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,39}")
_DECIMAL = re.compile(
    r"-?(?:0|[1-9][0-9]{0,17})?(?:\.[0-9]{1,18}(?:[eE][-+]?[0-9]{1,2})?|(?<=[0-9])[eE][-+]?[0-9]{1,2})"
)
_EMPTY = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_AMBIGUOUS = re.compile(r"yes|no|on|off", re.IGNORECASE)
# Control characters cannot be in a path, an argument or a message; half a surrogate pair not
# even in UTF-8. Quoted text can spell both with escapes.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(slots=True)
class Document:
    """What the file holds.

    Attributes:
        value: the top of the file; None when it is empty.
        lines: see `Source`.
        problems: what was refused; `value` holds the rest.
        lost: where `value` does not hold what the file means, because of a problem.
        complete: False when reading ended early, so that `value` is not worth validating.
    """

    value: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lost: set[KeyPath] = field(default_factory=set)
    complete: bool = True


def read_document(text: str) -> Document:
    """Read YAML text. Whatever is wrong is in `problems`; nothing is raised."""
    reader = _Reader()
    document = reader.document
    try:
        reader.read(yaml.parse(text, Loader=yaml.SafeLoader))
    except (_TooDeepError, yaml.YAMLError, ValueError, OverflowError) as error:
        document.problems.append(_fatal(error, text, reader.line))
        document.complete = False
    return document


class _TooDeepError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class _Reader:
    """Turns PyYAML's events into values. `line` is that of the event read last."""

    def __init__(self) -> None:
        self.document = Document()
        self.line = 1

    def read(self, events: Iterator[yaml.Event]) -> None:
        documents = 0
        for event in events:
            self.line = _line(event)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents == 2:
                    self._refuse((), "a second document begins here; one file is one cluster")
                    return
            elif isinstance(event, yaml.NodeEvent):
                self.document.lines[()] = self.line
                self.document.value = self._value(event, events, ())

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> object:
        if isinstance(event, yaml.AliasEvent):
            message = f"aliases are not read; write out what *{event.anchor} stands for"
            return self._lost(path, message, None)
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            self._refuse(path, f"anchors are not read; remove &{event.anchor}")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        assert isinstance(event, yaml.CollectionStartEvent)
        if event.tag is not None:
            self._refuse(path, f"tags are not read; remove {shorten(event.tag)}")
        if len(path) >= MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} levels deep"
            raise _TooDeepError(Problem(path, message, _line(event)))
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, path)
        return self._list(events, path)

    def _mapping(self, events: Iterator[yaml.Event], path: KeyPath) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for event in events:
            self.line = line = _line(event)
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, events, path)
            if key is None:
                self._skip(events)
                continue
            inner = (*path, key)
            if key in mapping:
                first = self.document.lines[inner]
                message = f"the key is already on line {first}; remove one of the two"
                self.document.problems.append(Problem(inner, message, line))
                self._skip(events)
                continue
            self.document.lines[inner] = line
            mapping[key] = self._value(next(events), events, inner)
        return mapping

    def _key(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> str | None:
        """The key as it is written; None when it was refused."""
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(path, "a key must be plain text")
            self._skip(events, event)
            return None
        if event.value == "<<" and event.implicit[0]:
            self._refuse((*path, "<<"), "merge keys are not read; write the keys out")
            return None
        if event.anchor is not None or event.tag is not None:
            self._refuse((*path, event.value), "a key takes neither an anchor nor a tag")
        if _UNPRINTABLE.search(event.value):
            self._refuse((*path, event.value), "a key must not contain control characters")
        return event.value

    def _list(self, events: Iterator[yaml.Event], path: KeyPath) -> list[object]:
        items: list[object] = []
        for event in events:
            self.line = _line(event)
            if isinstance(event, yaml.SequenceEndEvent):
                break
            inner = (*path, len(items))
            self.document.lines[inner] = self.line
            items.append(self._value(event, events, inner))
        return items

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> object:
        text = event.value
        if event.tag is not None:
            message = f"tags are not read; remove {shorten(event.tag)}, and quote what is text"
            return self._lost(path, message, text)
        if _UNPRINTABLE.search(text):
            return self._lost(path, "must not contain control characters", text)
        if not event.implicit[0]:  # in quotes, or a block
            return text
        if _AMBIGUOUS.fullmatch(text):
            message = (
                f"{text} is true or false to some readers of YAML and text to others; "
                f'write true or false, or "{text}" for the text'
            )
            return self._lost(path, message, text)
        return _plain(text)

    def _skip(self, events: Iterator[yaml.Event], event: yaml.Event | None = None) -> None:
        """Pass over one value, the one that `event` begins or the next one."""
        depth = 0
        event = event or next(events)
        while True:
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth == 0:
                return
            event = next(events)

    def _lost(self, path: KeyPath, message: str, value: object) -> object:
        """Refuse the value at `path`; `value` stands in for it."""
        self._refuse(path, message)
        self.document.lost.add(path)
        return value

    def _refuse(self, path: KeyPath, message: str) -> None:
        self.document.problems.append(Problem(path, message, self.line))


def _plain(text: str) -> object:
    """What text without quotes stands for."""
    if text in _EMPTY:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return text


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None  # every event that comes from text has one
    return int(event.start_mark.line) + 1


def _fatal(error: Exception, text: str, line: int) -> Problem:
    match error:
        case _TooDeepError():
            return error.problem
        case ReaderError():
            return _forbidden_character(error, text)
        case yaml.MarkedYAMLError():
            return _syntax_error(error)
        case _:
            # PyYAML hands the 8 digits of "\UFFFFFFFF" to chr() as they are.
            return Problem((), "not valid YAML: a number in an escape is out of range", line)


def _syntax_error(error: yaml.MarkedYAMLError) -> Problem:
    mark, begin = error.problem_mark, error.context_mark
    line = mark.line + 1 if mark else None
    if r"'\t'" in str(error.problem):
        return Problem((), "a tab cannot stand here; YAML is indented with spaces", line)
    message = f"not valid YAML: {error.problem}"
    if error.context and begin and begin.line + 1 != line:
        message += f", {error.context} that begins on line {begin.line + 1}"
    return Problem((), message, line)


def _forbidden_character(error: ReaderError, text: str) -> Problem:
    line = text.count("\n", 0, error.position) + 1
    return Problem((), f"the character U+{int(error.character):04X} cannot be in the file", line)
