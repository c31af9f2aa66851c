from __future__ import annotations

import pytest

from mtppp.errors import ConfigurationError
from mtppp.importer.shell import read_script


def words(text: str, given: dict[str, str] | None = None) -> list[list[str]]:
    return [[word.text for word in simple.words] for simple in read_script(text, "", given)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a''b \"\" ''", [["ab", "", ""]]),
        ("a # b\nc#d", [["a"], ["c#d"]]),
        ("a;b && c || d & e", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("(cd x; a)", [["cd", "x"], ["a"]]),
        ("if true; then a; fi", [["true"], ["a"]]),
        ("a >x 2>&1 <y b", [["a", "b"]]),
        ("a &> log b", [["a", "b"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a\\\nb", [["ab"]]),
        ('"a\\\nb"', [["ab"]]),
        ("X=1 Y=2\na $X$Y \"$X $Y\" '$X'", [["a", "12", "1 2", "$X"]]),
        ("X='1  2'\na $X \"$X\" b$X", [["a", "1", "2", "1  2", "b1", "2"]]),
        ("X=' 1 '\na b${X}c", [["a", "b", "1", "c"]]),
        ("X=(a 'b c')\nz ${X[0]:-d} \"${X[@]}\"", [["z", "${X[0]:-d}", "a", "b c"]]),
        ("a ${N:-b} ${N-c} ${N:-}", [["a", "b", "c"]]),
        ('a "$@" $* b', [["a", "b"]]),
        ("a `b c` $(d $(e)) $((1+2))", [["a", "`b c`", "$(d $(e))", "$((1+2))"]]),
        ("a $ b$", [["a", "$", "b$"]]),
        ('a "\\$X \\n"', [["a", "$X \\n"]]),
    ],
)
def test_words(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


def test_what_is_not_known_is_named() -> None:
    (simple,) = read_script('X="$A-1"\nrun $X $(hostname)')
    assert [word.unknown for word in simple.words] == [(), ("$A",), ("$(hostname)",)]


def test_assignments_are_for_the_command_or_exported() -> None:
    first, second = read_script("export A=1 B\nB=2\nC=3 D='4 5' run\nA=6\nrun")
    assert {name: word.text for name, word in first.env.items()} == {"C": "3", "D": "4 5"}
    assert {name: word.text for name, word in first.exported.items()} == {"A": "1"}
    assert second.exported["A"].text == "6"


def test_given_variables_win() -> None:
    assert words("A=1\nexport B=2\nC=(3)\nrun $A $B $C", {"A": "x", "B": "y", "C": "z"}) == [
        ["run", "x", "y", "z"]
    ]


def test_places() -> None:
    places = [simple.where for simple in read_script("a\n\nb \\\n  c\nd", "f.sh")]
    assert places[0] == "f.sh:1"
    assert places[-1].startswith("f.sh:")


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "X=(a b", "cat <<EOF\nEOF"])
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigurationError, match="line 1"):
        read_script(text)
