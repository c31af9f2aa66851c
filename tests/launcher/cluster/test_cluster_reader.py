"""What YAML becomes, what is refused, and that no input ends in anything but a problem."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mtppp.cluster.reader import MAX_DEPTH, read_document

EXAMPLE = Path(__file__).parents[3] / "cluster_configs" / "local-demo.yaml"


def said(text: str) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.message) for problem in read_document(text).problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0", 0),
        ("-3", -3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-0.25", -0.25),
        ("1e-5", 1e-5),
        ("2.5E+3", 2500.0),
        ("true", True),
        ("False", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("text", "text"),
        ("0.32.0", "0.32.0"),
        ('"8"', "8"),
        ("'true'", "true"),
        ('"yes"', "yes"),
        ("|\n  yes\n", "yes\n"),
        # Numbers to some readers of YAML, and not the same ones.
        ("0755", "0755"),
        ("1_000", "1_000"),
        ("0x1F", "0x1F"),
        ("12:30", "12:30"),
        ("+1", "+1"),
        ("1.", "1."),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("9" * 5000, "9" * 5000),
        ("2026-01-02", "2026-01-02"),
        ("~/x", "~/x"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    document = read_document(f"key: {text}")
    assert document.problems == []
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)  # True == 1


def test_keys_are_the_text_that_is_written() -> None:
    assert read_document("{1: a, true: b, null: c, on: d}").value == {
        "1": "a",
        "true": "b",
        "null": "c",
        "on": "d",
    }


def test_lines_are_those_of_keys_and_items() -> None:
    document = read_document(
        "# a comment\n"
        "name: x\n"
        "nodes:\n"
        "  - host: a\n"
        "\n"
        "    gpus: 8\n"
        "  - {host: b,\n"
        "     gpus: 8}\n"
        "text: |\n"
        "  one\n"
        "  two\n"
        "last: 1\n"
    )
    assert document.problems == []
    assert document.lines == {
        (): 2,
        ("name",): 2,
        ("nodes",): 3,
        ("nodes", 0): 4,
        ("nodes", 0, "host"): 4,
        ("nodes", 0, "gpus"): 6,
        ("nodes", 1): 7,
        ("nodes", 1, "host"): 7,
        ("nodes", 1, "gpus"): 8,
        ("text",): 9,
        ("last",): 12,
    }


def test_lines_of_a_file_with_carriage_returns() -> None:
    assert read_document("a: 1\r\nb: 2\r\n").lines[("b",)] == 2


REFUSED = [
    (
        "a: 1\nb: {c: 1}\na: 2\n",
        [(3, "the key is already on line 1; remove one of the two")],
    ),
    (
        "a:\n  b: 1\n  b: {c: [1]}\n  b: 3\n",
        [
            (3, "the key is already on line 2; remove one of the two"),
            (4, "the key is already on line 2; remove one of the two"),
        ],
    ),
    ('a: 1\n"a": 2\n', [(2, "the key is already on line 1; remove one of the two")]),
    ("a: &x 1\n", [(1, "anchors are not read; remove &x")]),
    ("a: &x [1]\n", [(1, "anchors are not read; remove &x")]),
    (
        "a: &x 1\nb: *x\n",
        [
            (1, "anchors are not read; remove &x"),
            (2, "aliases are not read; write out what *x stands for"),
        ],
    ),
    ("a: 1\n<<: {b: 1}\n", [(2, "merge keys are not read; write the keys out")]),
    ("&x a: 1\n", [(1, "a key takes neither an anchor nor a tag")]),
    (
        "a: !!str 5\n",
        [(1, 'tags are not read; remove "tag:yaml.org,2002:str", and quote what is text')],
    ),
    ("a: !include x.yaml\n", [(1, 'tags are not read; remove "!include", and quote what is text')]),
    (
        "a: !!python/object:os.system [x]\n",
        [(1, 'tags are not read; remove "tag:yaml.org,2002:python/object:os.system"')],
    ),
    ("? [a, b]\n: 1\n", [(1, "a key must be plain text")]),
    (
        "a: Yes\n",
        [
            (
                1,
                "Yes is true or false to some readers of YAML and text to others; "
                'write true or false, or "Yes" for the text',
            )
        ],
    ),
    ("a: 1\n---\nb: 1\n", [(2, "a second document begins here; one file is one cluster")]),
    ('a: "x\\0y"\n', [(1, "must not contain control characters")]),
    ('a: "\\uD800"\n', [(1, "must not contain control characters")]),
    ('"\\e[2J": 1\n', [(1, "a key must not contain control characters")]),
    ("a: 1\n\x00", [(2, "the character U+0000 cannot be in the file")]),
    ("a:\n\t b: 1\n", [(2, "a tab cannot stand here; YAML is indented with spaces")]),
    ("a: b: c\n", [(1, "not valid YAML: mapping values are not allowed here")]),
    (
        "a: 1\nb: {c: 1\n",
        [
            (
                3,
                "not valid YAML: expected ',' or '}', but got '<stream end>', "
                "while parsing a flow mapping that begins on line 2",
            )
        ],
    ),
    (
        'a: "\n\nb: 1\n',
        [
            (
                4,
                "not valid YAML: found unexpected end of stream, "
                "while scanning a quoted scalar that begins on line 1",
            )
        ],
    ),
    ('a: 1\nb: "\\UFFFFFFFF"\n', [(2, "not valid YAML: a number in an escape is out of range")]),
    ("a: " + "[" * 30, [(1, f"nested more than {MAX_DEPTH} levels deep")]),
    ("a: " + "{b: " * 30, [(1, f"nested more than {MAX_DEPTH} levels deep")]),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_refused(text: str, expected: list[tuple[int, str]]) -> None:
    assert said(text) == expected


def test_the_rest_is_read_in_spite_of_what_is_refused() -> None:
    document = read_document("a: 1\na: {x: [1, 2]}\n? [k]\n: {x: 1}\n<<: {y: 1}\nb: *x\nc: 3\n")
    assert document.value == {"a": 1, "b": None, "c": 3}
    assert document.complete
    assert document.lost == {("b",)}


def test_a_syntax_error_ends_the_reading() -> None:
    assert not read_document("a: 1\nb: c: d\n").complete


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n", "~\n"])
def test_nothing(text: str) -> None:
    document = read_document(text)
    assert (document.value, document.problems, document.complete) == (None, [], True)


def test_endless_nesting_is_not_read_to_its_end() -> None:
    assert said("[" * 200_000) == [(1, f"nested more than {MAX_DEPTH} levels deep")]


def test_whatever_the_text_nothing_is_raised() -> None:
    """Random damage to a real file, and random YAML punctuation. The seed is fixed."""
    rng = random.Random(0)
    original = EXAMPLE.read_text(encoding="utf-8")
    alphabet = "ab: -[]{},&*!|>'\"%@`#?\\\t\n~<0.1\x00\x85\u2028\ufeff\ud800é"
    for _ in range(150):
        text = list(original)
        for _ in range(rng.randint(1, 8)):
            text[rng.randrange(len(text))] = rng.choice(alphabet)
        read_document("".join(text))
    for _ in range(4000):
        read_document("".join(rng.choices(alphabet, k=rng.randint(1, 30))))
