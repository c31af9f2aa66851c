"""Reads the shell that people keep their commands in: words, quotes, variables, arrays.

Not a shell: nothing is run. Variables get their values from assignments in the text; what cannot
be known without running something (`$(...)`, `$1`, a variable nobody set) stays as it is written,
and the word says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mtppp.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*):?[-=](.*)", re.DOTALL)
_ELEMENTS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]")
_BLANK_CONTINUATION = re.compile(r"\\[ \t]+$", re.MULTILINE)
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_KEYWORDS = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "}", "fi"})
_SEPARATORS = "\n;&|()"
_QUOTE_HINT = "is the command whole? Quotes that a word processor made round are not quotes"


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, its quotes taken off.

    Attributes:
        text: with variables put in; what is not known stands as written, `$HEAD_IP`.
        unknown: those references.
    """

    text: str
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Simple:
    """A command without control flow.

    Attributes:
        words: the program and its arguments.
        env: what is assigned before the program, for it alone.
        exported: what was exported before.
        where: "serve.sh:12" or "line 12".
    """

    words: tuple[Word, ...]
    env: Mapping[str, Word]
    exported: Mapping[str, Word]
    where: str


@dataclass
class _Scanner:
    """Position in a text, and the variables as they are there."""

    text: str
    source: str
    variables: dict[str, tuple[Word, ...]]
    exported: set[str] = field(default_factory=set)
    at: int = 0

    @property
    def where(self) -> str:
        line = self.text.count("\n", 0, self.at) + 1
        return f"{self.source}:{line}" if self.source else f"line {line}"

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]


def read_script(
    text: str, source: str = "", given: Mapping[str, str] | None = None
) -> list[Simple]:
    """The simple commands of a script, in order.

    Args:
        source: the file's name, for messages; "" for text from the command line.
        given: variables set from outside; an assignment in the text does not change them.

    Raises:
        ConfigurationError: a quote is not closed, or there is a here-document.
    """
    text = _BLANK_CONTINUATION.sub(r"\\", text.replace("\r\n", "\n"))
    # A path that begins with the home directory keeps its meaning on every node.
    variables: dict[str, tuple[Word, ...]] = {"HOME": (Word("~"),)}
    variables |= {name: (Word(value),) for name, value in (given or {}).items()}
    scanner = _Scanner(text, source, variables)
    fixed = frozenset(given or ())
    return list(_commands(scanner, fixed))


def _commands(scanner: _Scanner, fixed: frozenset[str]) -> Iterator[Simple]:
    while scanner.at < len(scanner.text):
        where = scanner.where
        words = _command(scanner, fixed)
        while words and words[0].text in _KEYWORDS:
            words = words[1:]
        if words and words[0].text in _DECLARE:
            _declare(scanner, words, fixed)
            continue
        env, words = _leading_assignments(words)
        if not words:
            _assign(scanner, env, fixed)
            continue
        # What was exported and then assigned anew has the new value.
        exported = {name: scanner.variables[name][0] for name in scanner.exported}
        yield Simple(tuple(words), env, exported, where)


def _assign(scanner: _Scanner, env: Mapping[str, Word], fixed: frozenset[str]) -> None:
    for name, value in env.items():
        if name not in fixed:
            scanner.variables[name] = (value,)


def _declare(scanner: _Scanner, words: list[Word], fixed: frozenset[str]) -> None:
    for word in words[1:]:
        name, equals, value = word.text.partition("=")
        if not _NAME.fullmatch(name):
            continue
        if equals and name not in fixed:
            scanner.variables[name] = (Word(value, word.unknown),)
        if words[0].text == "export" and name in scanner.variables:
            scanner.exported.add(name)


def _leading_assignments(words: list[Word]) -> tuple[dict[str, Word], list[Word]]:
    env: dict[str, Word] = {}
    for index, word in enumerate(words):
        match = _ASSIGNMENT.match(word.text)
        if match is None or match[2]:
            return env, words[index:]
        env[match[1]] = Word(word.text[match.end() :], word.unknown)
    return env, []


def _command(scanner: _Scanner, fixed: frozenset[str]) -> list[Word]:
    """The words up to the next separator, which is passed over."""
    words: list[Word] = []
    while scanner.at < len(scanner.text):
        char = scanner.peek()
        if scanner.peek(2) == "\\\n":
            scanner.at += 2
        elif char in " \t":
            scanner.at += 1
        elif char == "#":
            _skip_line(scanner)
        elif redirection := re.match(r"[0-9]*(?:&>>?|<<<|<<|>>|[<>]&|>\||[<>])", _rest(scanner)):
            _redirect(scanner, redirection[0])
        elif char in _SEPARATORS:
            scanner.at += 1
            if words:
                return words
        elif array := re.match(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(", _rest(scanner)):
            _array(scanner, array, fixed)
        else:
            words += _word(scanner)
    return words


def _rest(scanner: _Scanner) -> str:
    """Enough of what follows to recognise an operator or an assignment."""
    return scanner.text[scanner.at : scanner.at + 200]


def _skip_line(scanner: _Scanner) -> None:
    end = scanner.text.find("\n", scanner.at)
    scanner.at = len(scanner.text) if end < 0 else end


def _redirect(scanner: _Scanner, operator: str) -> None:
    if operator.endswith("<<"):
        raise ConfigurationError(
            f"{scanner.where}: here-documents are not read",
            hint="give the command alone, or the file without the here-document",
        )
    scanner.at += len(operator)
    while scanner.peek() in (" ", "\t"):
        scanner.at += 1
    if scanner.peek() not in ("", "\n"):
        _word(scanner)


def _array(scanner: _Scanner, opening: re.Match[str], fixed: frozenset[str]) -> None:
    name, append = opening[1], bool(opening[2])
    start = scanner.where
    scanner.at += opening.end()
    elements: list[Word] = []
    while True:
        char = scanner.peek()
        if not char:
            raise ConfigurationError(f"{start}: the array {name} has no closing parenthesis")
        if char == ")":
            scanner.at += 1
            break
        if char in " \t\n":
            scanner.at += 1
        elif scanner.peek(2) == "\\\n":
            scanner.at += 2
        elif char == "#":
            _skip_line(scanner)
        else:
            elements += _word(scanner)
    if name not in fixed:
        before = scanner.variables.get(name, ()) if append else ()
        scanner.variables[name] = (*before, *elements)


class _Builder:
    """Words while they grow: an unquoted variable may end one and begin another."""

    def __init__(self) -> None:
        self.done: list[Word] = []
        self._text: str | None = None
        self._unknown: list[str] = []

    @property
    def is_empty(self) -> bool:
        return self._text is None and not self.done

    def add(self, text: str, unknown: tuple[str, ...] = ()) -> None:
        self._text = (self._text or "") + text
        self._unknown += unknown

    def split(self, value: Word) -> None:
        """An unquoted value: its blanks separate words. A reference not known is one word."""
        if value.text in value.unknown:
            self.add(value.text, value.unknown)
            return
        if value.text[:1].isspace():
            self.end()
        for index, part in enumerate(value.text.split()):
            if index:
                self.end()
            self.add(part, value.unknown)
        if value.text[-1:].isspace():
            self.end()

    def end(self) -> None:
        if self._text is not None:
            self.done.append(Word(self._text, tuple(dict.fromkeys(self._unknown))))
        self._text, self._unknown = None, []


def _word(scanner: _Scanner) -> list[Word]:
    """The word at the scanner's position; several, or none, where a variable says so."""
    builder = _Builder()
    first = scanner.at
    while scanner.at < len(scanner.text):
        char = scanner.peek()
        if char in " \t" or char in _SEPARATORS or char in "<>":
            break
        if char == "'":
            builder.add(_single_quoted(scanner))
        elif char == '"':
            _double_quoted(scanner, builder)
        elif char == "\\":
            if scanner.peek(2) != "\\\n":
                builder.add(scanner.text[scanner.at + 1 : scanner.at + 2])
            scanner.at += 2
        elif char in "$`":
            # An assignment's value is not split.
            assigns = _ASSIGNMENT.match(scanner.text, first, scanner.at) is not None
            for index, value in enumerate(_reference(scanner)):
                if index:
                    builder.end()
                (builder.add(value.text, value.unknown) if assigns else builder.split(value))
        else:
            builder.add(char)
            scanner.at += 1
    builder.end()
    return builder.done


def _single_quoted(scanner: _Scanner) -> str:
    end = scanner.text.find("'", scanner.at + 1)
    if end < 0:
        raise ConfigurationError(f"{scanner.where}: a single quote is not closed", hint=_QUOTE_HINT)
    text = scanner.text[scanner.at + 1 : end]
    scanner.at = end + 1
    return text


def _double_quoted(scanner: _Scanner, builder: _Builder) -> None:
    start = scanner.where
    scanner.at += 1
    # "" is an empty word; "$@" without arguments is none.
    is_list = scanner.text[scanner.at :].startswith(("$@", "${")) and builder.is_empty
    while True:
        char = scanner.peek()
        if not char:
            raise ConfigurationError(f"{start}: a double quote is not closed", hint=_QUOTE_HINT)
        if char == '"':
            scanner.at += 1
            if not is_list:
                builder.add("")
            return
        if char == "\\" and scanner.peek(2)[1:] in ('"', "\\", "$", "`", "\n"):
            if scanner.peek(2) != "\\\n":
                builder.add(scanner.text[scanner.at + 1])
            scanner.at += 2
        elif char in "$`":
            for index, value in enumerate(_reference(scanner)):
                if index:
                    builder.end()
                builder.add(value.text, value.unknown)
        else:
            builder.add(char)
            scanner.at += 1


def _reference(scanner: _Scanner) -> tuple[Word, ...]:
    """What `$X`, `${X}`, `${X:-d}`, `${X[@]}`, `$(...)` or backquotes stand for."""
    start = scanner.at
    if scanner.peek() == "`":
        end = scanner.text.find("`", start + 1)
        scanner.at = len(scanner.text) if end < 0 else end + 1
        return _unknown(scanner.text[start : scanner.at])
    opening = scanner.peek(2)
    if opening in ("$(", "${"):
        scanner.at = _closing(scanner.text, start + 1)
        written = scanner.text[start : scanner.at]
        return _unknown(written) if opening == "$(" else _braced(scanner, written)
    name = _NAME.match(scanner.text, start + 1)
    if name is not None:
        scanner.at = name.end()
        return scanner.variables.get(name[0], _unknown(f"${name[0]}"))[:1]
    special = scanner.text[start + 1 : start + 2]
    if special and special in "0123456789@*#?$!-":
        scanner.at += 2
        # The arguments of the script itself: there are none.
        return () if special in "@*" else _unknown(f"${special}")
    scanner.at += 1
    return (Word("$"),)


def _braced(scanner: _Scanner, written: str) -> tuple[Word, ...]:
    inner = written[2:-1]
    if _NAME.fullmatch(inner):
        return scanner.variables.get(inner, _unknown(written))[:1]
    if elements := _ELEMENTS.fullmatch(inner):
        return scanner.variables.get(elements[1], _unknown(written))
    if default := _DEFAULT.fullmatch(inner):
        nested = _Scanner(f'"{default[2]}"', scanner.source, scanner.variables)
        return scanner.variables.get(default[1]) or tuple(_word(nested))
    return _unknown(written)


def _unknown(written: str) -> tuple[Word, ...]:
    return (Word(written, (written,)),)


def _closing(text: str, opening: int) -> int:
    """Position after the bracket that closes the one at `opening`; the end where none does."""
    brackets = {"(": ")", "{": "}"}
    open_, close = text[opening], brackets[text[opening]]
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == open_) - (text[at] == close)
        if depth == 0:
            return at + 1
    return len(text)
