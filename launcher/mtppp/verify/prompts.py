"""What both servers are asked: a set of our own, or a file of the operator's.

The set was written for mtppp and is under its licence, Apache-2.0. It is made of `passages.txt`
and of drills that are drawn by numbers; the same prompts come out everywhere, and a hash says so.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from mtppp.errors import ConfigurationError

# sha256 of the first so many prompts of the set.
PINNED = {
    300: "1fcf83eb13cab1b1f52809bce13add06dbdd22101781bb1cc0fab17e8ddde3c2",
    512: "329bcf91af8552e3ded6898e9454cde1ad568eb928ffa08699df9fd05df450aa",
    2048: "f9c92b59b438b8ca9ed03677ee00cbb79bf36447599940f2403fb05204d35e55",
}

# Tokens of the long prompts, in turn; servers with a shorter context get as much as they take.
_LONG = (1024, 2048, 1024, 4096, 1024, 2048, 8192)

# No tokenizer that matters makes fewer tokens of as many characters.
_CHARACTERS_PER_TOKEN = 6

_BRIEF = 96  # tokens

_ENGLISH = 12  # so many of the passages are; the others are one a language


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: to be continued; "" for the others.
        messages: a conversation to be answered, rendered by the model's own chat template.
        ids: token ids, for servers without a tokenizer.
        length: `text` is cut after so many tokens; 0 leaves it whole.
    """

    key: str
    kind: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    ids: tuple[int, ...] = ()
    length: int = 0


def own_set(count: int) -> list[Prompt]:
    """The first `count` prompts of the set, at most 2,048.

    The kinds alternate, so that each part of the set has all of them.
    """
    prompts = [_prompt(index) for index in range(count)]
    pinned = PINNED.get(count)
    assert pinned is None or pinned == fingerprint(prompts), "the prompts are not those pinned"
    return prompts


def brief_set(count: int) -> list[Prompt]:
    """The first `count` texts of the set that have at most 96 tokens."""
    brief = (prompt for prompt in map(_prompt, range(1 << 10)) if 0 < prompt.length <= _BRIEF)
    return list(islice(brief, count))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 of everything that is asked."""
    content = [[p.key, p.kind, p.text, p.messages, p.ids, p.length] for p in prompts]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_file(path: Path) -> list[Prompt]:
    """Prompts of a JSON Lines file, each line with `text`, `messages` or `token_ids`.

    What is there twice is asked once: its answers depend on each other, and would count as if they
    did not.

    Raises:
        ConfigurationError: names the line that is not such a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    prompts: dict[object, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _of_line(line, f"{path}:{number}")
            prompts.setdefault((prompt.text, prompt.messages, prompt.ids), prompt)
    if not prompts:
        raise ConfigurationError(
            f"{path} has no prompts", hint='one JSON object a line, such as {"text": "Once"}'
        )
    return list(prompts.values())


def _of_line(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
        given = [name for name in ("text", "messages", "token_ids") if name in entry]
        kind = str(entry.get("kind", "own"))
        match given:
            case ["text"] if isinstance(entry["text"], str) and entry["text"]:
                return Prompt(place, kind, text=entry["text"])
            case ["messages"] if entry["messages"]:
                messages = tuple((str(m["role"]), str(m["content"])) for m in entry["messages"])
                return Prompt(place, kind, messages=messages)
            case ["token_ids"] if entry["token_ids"] and all(map(_is_id, entry["token_ids"])):
                return Prompt(place, kind, ids=tuple(entry["token_ids"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigurationError(
        f"{place}: not a prompt: {line.strip()[:60]}",
        hint='one JSON object a line: {"text": "..."}, {"messages": [{"role": "...", "content":'
        ' "..."}]} or {"token_ids": [1, 2]}',
    )


def _is_id(token: object) -> bool:
    return type(token) is int and token >= 0


class _Draw:
    """Choices by a seed. Only `random()` is promised to stay the same in later Pythons."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - reproducible, not secret

    def number(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def one(self, items: Sequence[str]) -> str:
        return items[self.number(0, len(items) - 1)]


def _prompt(index: int) -> Prompt:
    draw = _Draw(index)
    kind = _TURN[index % len(_TURN)]
    key = f"{kind}-{index}"
    if kind in _CHATS:
        return Prompt(key, kind, messages=_CHATS[kind](draw))
    if kind == "long":
        length = _LONG[index // len(_TURN) % len(_LONG)]
        make: Callable[[_Draw], str] = _TEXTS[draw.one(("prose", "json", "code", "language"))]
    else:
        length = (32, 48, 64, 96, 128, 192, 256)[draw.number(0, 6)]
        make = _TEXTS[kind]
    text = make(draw)
    while len(text) < length * _CHARACTERS_PER_TOKEN:
        text += make(draw)
    return Prompt(key, kind, text=text[: length * _CHARACTERS_PER_TOKEN], length=length)


@cache
def _passages() -> tuple[str, ...]:
    file = resources.files("mtppp.verify") / "passages.txt"
    return tuple(file.read_text(encoding="utf-8").splitlines())


_NAMES = ("ada", "bruno", "clara", "denis", "edith", "farid", "greta", "hugo", "ines", "jonas")
_THINGS = ("lamp", "rope", "wheel", "ledger", "kettle", "anchor", "button", "ladder", "mirror")
_VERBS = ("merge", "count", "filter", "rotate", "encode", "split", "collect", "balance")


def _prose(draw: _Draw) -> str:
    return _from_within(draw, _passages()[:_ENGLISH])


def _language(draw: _Draw) -> str:
    return _from_within(draw, _passages()[_ENGLISH:])


def _from_within(draw: _Draw, passages: Sequence[str]) -> str:
    """A passage from somewhere in its first half on, at a word where words have spaces."""
    passage = draw.one(passages)
    rest = passage[draw.number(0, len(passage) // 2) :]
    return (rest.partition(" ")[2] or rest) + "\n\n"


def _digits(draw: _Draw) -> str:
    """A row of numbers and its copies: to go on is to copy."""
    row = " ".join(str(draw.number(10_000, 99_999)) for _ in range(draw.number(3, 8)))
    return f"{row}\n" * 12


def _json(draw: _Draw) -> str:
    rows = [
        f'{{"id": {draw.number(100, 999)}, "name": "{draw.one(_NAMES)}", "item":'
        f' "{draw.one(_THINGS)}", "amount": {draw.number(1, 99)}, "paid": false}}'
        for _ in range(draw.number(2, 5))
    ]
    return ("[" + ",\n ".join(rows) + "]\n") * 4


def _counting(draw: _Draw) -> str:
    start, step = draw.number(0, 400), draw.number(1, 9)
    numbers = " ".join(str(start + step * i) for i in range(300))
    return f"count {start} by {step}: {numbers}\n"


def _repetition(draw: _Draw) -> str:
    words = " ".join(draw.one(_THINGS) for _ in range(draw.number(4, 8)))
    return f"Repeat: {words}; " + f"{words}; " * 20


def _code(draw: _Draw) -> str:
    verb, thing, other = draw.one(_VERBS), draw.one(_THINGS), draw.one(_NAMES)
    limit = draw.number(2, 64)
    return draw.one(
        (
            f"def {verb}_{thing}s({thing}s, limit={limit}):\n"
            f'    """Return at most `limit` {thing}s that belong to {other}."""\n'
            f"    chosen = []\n    for {thing} in {thing}s:\n"
            f'        if {thing}.owner == "{other}" and len(chosen) < limit:\n'
            f"            chosen.append({thing})\n    return chosen\n\n\n",
            f"SELECT {thing}.id, {thing}.owner, COUNT(*) AS total\nFROM {thing}\n"
            f"JOIN {other} ON {other}.id = {thing}.{other}_id\nWHERE total > {limit}\n"
            f"GROUP BY {thing}.id\nORDER BY total DESC;\n\n",
            f"static int {verb}_{thing}(const struct {thing} *items, size_t count)\n{{\n"
            f"    int total = {limit};\n    for (size_t i = 0; i < count; i++) {{\n"
            f"        total += items[i].weight;\n    }}\n    return total;\n}}\n\n",
        )
    )


def _tools(draw: _Draw) -> tuple[tuple[str, str], ...]:
    tool = {
        "name": f"{draw.one(_VERBS)}_{draw.one(_THINGS)}",
        "parameters": {"owner": "string", "amount": "integer"},
    }
    return (
        (
            "system",
            f"You may call this tool: {json.dumps(tool)}\n"
            'Answer only with JSON: {"name": ..., "arguments": {...}}.',
        ),
        ("user", f"Please do it for {draw.one(_NAMES)}, {draw.number(2, 900)} of them."),
    )


def _reasoning(draw: _Draw) -> tuple[tuple[str, str], ...]:
    a, b, c = draw.number(3, 60), draw.number(3, 60), draw.number(2, 9)
    who, thing = draw.one(_NAMES).title(), draw.one(_THINGS)
    return (
        (
            "user",
            f"{who} has {a} {thing}s and buys {c} boxes of {b}. One in {c} breaks. How many are"
            " whole? Think step by step, then give the number.",
        ),
    )


_TEXTS: dict[str, Callable[[_Draw], str]] = {
    "prose": _prose,
    "language": _language,
    "digits": _digits,
    "json": _json,
    "counting": _counting,
    "repetition": _repetition,
    "code": _code,
}
_CHATS: dict[str, Callable[[_Draw], tuple[tuple[str, str], ...]]] = {
    "tools": _tools,
    "reasoning": _reasoning,
}
_TURN = (
    *("prose", "digits", "language", "tools", "code", "json", "counting", "repetition"),
    *("prose", "reasoning", "language", "json", "code", "digits", "counting", "long"),
)
KINDS = tuple(dict.fromkeys(_TURN))


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A text that any language model goes on with in the same way."""

    text: str
    answer: str


KNOWN_ANSWERS = tuple(
    KnownAnswer(text, answer)
    for text, answer in (
        ("1 2 3 4 5 6 7 8 9 10 11 12", " 13 14 15"),
        ("10 20 30 40 50 60", " 70 80 90"),
        ("5 10 15 20 25 30 35", " 40 45 50"),
        ("2 4 6 8 10 12 14 16", " 18 20 22"),
        ("A B C D E F G H", " I J K"),
        ("Monday Tuesday Wednesday Thursday", " Friday Saturday"),
        ("January February March April May", " June July August"),
        ("one two three four five six", " seven eight nine"),
        ("red green blue red green blue red green blue red", " green blue"),
        ("7 3 9 1; 7 3 9 1; 7 3 9 1; 7 3", " 9 1; 7"),
        ("lamp rope wheel; lamp rope wheel; lamp rope", " wheel; lamp"),
        ("100 99 98 97 96 95", " 94 93 92"),
    )
)


# Of prompts, in tokens; what is shorter than the second is not in the set.
_LENGTHS = {"0-31": (0, 31), "32-256": (32, 256), "257-2048": (257, 2048), "2049-": (2049, 1 << 30)}


def coverage(lengths: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """What prompts cover: how many of each kind, and of each range of lengths in tokens; and which
    kinds and ranges of our own set they do not.

    Args:
        lengths: kind and tokens of each prompt.
    """
    kinds = Counter(kind for kind, _ in lengths)
    ranges = {
        name: sum(low <= tokens <= high for _, tokens in lengths)
        for name, (low, high) in _LENGTHS.items()
    }
    return {
        "kinds": dict(kinds),
        "tokens": ranges,
        "longest": max((tokens for _, tokens in lengths), default=0),
        "not_covered": {
            "kinds": [kind for kind in KINDS if not kinds[kind]],
            "tokens": [name for name in list(_LENGTHS)[1:] if not ranges[name]],
        },
    }
