"""The flags of `vllm serve`, read as vLLM's own parser reads them.

Which there are, and what each takes, was recorded from that parser (`scripts/record_serve_flags`).
Underscores are dashes, any beginning that is unique is the flag, `--x.y v` is a key of the mapping
`--x`, of a flag given twice the last counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mtppp.errors import ConfigurationError
from mtppp.importer.shell import Word

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_HINT = "the command is as vLLM would refuse it; correct it and import again"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `vllm serve`.

    Attributes:
        name: long, without dashes.
        takes: "one", "many", "optional", "nothing", or "switch" (`--x`, `--no-x`).
        kind: of the value: "integer", "number", "size", or "" for text and JSON.
        releases: of vLLM that have it.
    """

    name: str
    takes: str
    kind: str
    releases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """All flags by every name they have, dashes included."""

    releases: tuple[str, ...]
    by_option: Mapping[str, Flag]

    def find(self, option: str) -> Flag | None:
        """The flag of `option` (dashes for underscores), which may be a unique beginning.

        Raises:
            ConfigurationError: it is the beginning of several.
        """
        if exact := self.by_option.get(option):
            return exact
        if not option.startswith("--"):
            return None
        found = {name: flag for name, flag in self.by_option.items() if name.startswith(option)}
        if len({flag.name for flag in found.values()}) > 1 and len(option) > 2:
            candidates = ", ".join(sorted(found)[:6])
            raise ConfigurationError(f"{option} could be {candidates}", hint=_HINT)
        return next(iter(found.values()), None)


@cache
def table() -> Table:
    """The flags that were recorded."""
    data = json.loads(Path(__file__).with_name("serve_flags.json").read_text(encoding="utf-8"))
    by_option: dict[str, Flag] = {}
    for name, entry in data["flags"].items():
        flag = Flag(
            name, entry["takes"], entry.get("kind", ""), tuple(entry.get("in", data["releases"]))
        )
        names = [f"--{name}", *(o if o[0] == "-" else f"--{o}" for o in entry.get("also", ()))]
        by_option |= dict.fromkeys(names, flag)
        if flag.takes == "switch":
            by_option |= {f"--no-{option[2:]}": flag for option in names if option.startswith("--")}
    return Table(tuple(data["releases"]), by_option)


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as a command gives it.

    Attributes:
        value: as YAML would have it: a switch is true or false, JSON is parsed.
        known: vLLM has it in some release that was recorded.
        written: as it stands in the command, dashes included.
        unknown: references in the value that have no value.
    """

    name: str
    value: Any
    known: bool
    written: str
    unknown: tuple[str, ...] = ()


@dataclass
class Parsed:
    """A command's arguments.

    Attributes:
        model: the positional argument.
        repeated: flags that were given more than once; the last one is in `flags`.
    """

    model: Word | None = None
    flags: dict[str, Given] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    surplus: list[Word] = field(default_factory=list)


def parse_flags(words: Sequence[Word]) -> Parsed:
    """The arguments behind `vllm serve`.

    Raises:
        ConfigurationError: an abbreviation is not unique, a value is missing, a number is none.
    """
    parsed = Parsed()
    mappings: dict[str, Given] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_option(word.text):
            if parsed.model is None:
                parsed.model = word
            else:
                parsed.surplus.append(word)
            continue
        option, equals, attached = _split(word.text)
        values = [Word(attached, word.unknown)] if equals else []
        name, dot, path = option.partition(".")
        flag = table().find(name)
        if not equals:
            wanted = "one" if dot else _wants(flag)
            position, values = _values(words, position, wanted, word.text)
        if dot:
            _set_in(mappings, flag.name if flag else name.lstrip("-"), path, values[0], flag)
            continue
        given = _given(option, flag, values, word.text, attached=bool(equals))
        if given.name in parsed.flags:
            parsed.repeated.append(given.name)
        parsed.flags[given.name] = given
    # vLLM puts what was given key by key behind all the rest, as one mapping.
    for key, given in mappings.items():
        if key in parsed.flags:
            parsed.repeated.append(key)
        parsed.flags[key] = given
    return parsed


def _is_option(text: str) -> bool:
    return len(text) > 1 and text.startswith("-") and not _NUMBER.fullmatch(text)


def _split(text: str) -> tuple[str, str, str]:
    """(option, "=" or "", value), with the option in the form the table has."""
    if text.startswith("-O") and len(text) > 2:
        return "--optimization-level", "=", text[2:].removeprefix("=")
    if text == "-O":
        return "--optimization-level", "", ""
    option, equals, value = text.partition("=")
    if option.startswith("--"):
        name, dot, path = option[2:].partition(".")
        return f"--{name.replace('_', '-')}{dot}{path}", equals, value
    # argparse lets the value follow a short flag of one letter at once: -n2.
    if not equals and option[:2] in table().by_option and option not in table().by_option:
        return option[:2], "=", option[2:]
    return option, equals, value


def _wants(flag: Flag | None) -> str:
    return "guess" if flag is None else "nothing" if flag.takes == "switch" else flag.takes


def _values(
    words: Sequence[Word], position: int, wanted: str, written: str
) -> tuple[int, list[Word]]:
    """The values that follow, and the position behind them."""
    if wanted == "nothing":
        return position, []
    if wanted == "one":
        if position == len(words) or _is_option(words[position].text):
            raise ConfigurationError(f"{written} needs a value", hint=_HINT)
        return position + 1, [words[position]]
    values: list[Word] = []
    while position < len(words) and not _is_option(words[position].text):
        values.append(words[position])
        position += 1
        if wanted in ("optional", "guess"):
            break
    return position, values


def _given(
    option: str, flag: Flag | None, values: Sequence[Word], written: str, *, attached: bool
) -> Given:
    unknown = tuple(dict.fromkeys(name for value in values for name in value.unknown))
    if flag is None:
        value = _value(values[0].text, "") if values else True
        return Given(option.lstrip("-"), value, known=False, written=written, unknown=unknown)
    if flag.takes in ("switch", "nothing"):
        if attached:
            raise ConfigurationError(f"{written}: the flag takes no value", hint=_HINT)
        is_on = not (option.startswith("--no-") and flag.takes == "switch")
        return Given(flag.name, is_on, known=True, written=written)
    if flag.takes == "many":
        several = [_value(value.text, flag.kind, written) for value in values]
        return Given(flag.name, several, known=True, written=written, unknown=unknown)
    value = _value(values[0].text, flag.kind, written, unknown) if values else True
    return Given(flag.name, value, known=True, written=written, unknown=unknown)


def _value(text: str, kind: str, written: str = "", unknown: tuple[str, ...] = ()) -> Any:
    if unknown:
        return text
    if kind in ("integer", "number", "size"):
        return _number(text, kind, written)
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigurationError(
                f"{written or text}: not JSON: {text}",
                hint=f"{error}; JSON on a command line stands in single quotes",
            ) from error
    return text


def _number(text: str, kind: str, written: str) -> int | float | str:
    """A number; sizes may be written 128k (1000s) or 128K (1024s)."""
    if kind == "size" and text in ("auto", "-1"):
        return "auto"
    if kind == "size" and (size := _SIZE.fullmatch(text)):
        thousands = 1 + "kmgt".index(size[2].lower())
        if size[2].islower():
            return int(float(size[1]) * 1000**thousands)
        return int(float(size[1]) * 1024**thousands)
    try:
        return float(text) if kind == "number" else int(text)
    except ValueError:
        raise ConfigurationError(f"{written}: {text!r} is no number", hint=_HINT) from None


def _set_in(
    mappings: dict[str, Given], name: str, path: str, word: Word, flag: Flag | None
) -> None:
    """`--x.a.b v` -> {"a": {"b": v}}; `--x.a+ v,w` appends to a list."""
    given = mappings.get(name)
    mapping: dict[str, Any] = given.value if given else {}
    *outer, last = path.split(".")
    inner = mapping
    for key in outer:
        inner = inner.setdefault(key, {})
    if last.endswith("+"):
        inner.setdefault(last[:-1], []).extend(_scalar(part) for part in word.text.split(","))
    else:
        inner[last] = _scalar(word.text)
    unknown = (*(given.unknown if given else ()), *word.unknown)
    mappings[name] = Given(name, mapping, flag is not None, f"--{name}.{path}", unknown)


def _scalar(text: str) -> Any:
    """A key's value: JSON where it is, else a size, else text; True and False are switches."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except ValueError:
        return _number(text, "size", text) if _SIZE.fullmatch(text) else text


def values_of(given: Given | None) -> Iterator[str]:
    """The values of a flag that may take several, as text."""
    if given is None:
        return
    yield from (str(value) for value in _listed(given.value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
