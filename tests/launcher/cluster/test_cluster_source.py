from __future__ import annotations

from pathlib import Path

import pytest

from mtppp.cluster import KeyPath, Source
from mtppp.cluster.source import describe, render

SOURCE = Source(
    Path("cluster.yaml"),
    {(): 2, ("nodes",): 3, ("nodes", 0): 4, ("nodes", 0, "host"): 4, ("nodes", 1): 7},
)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2),
        (("nodes",), 3),
        (("nodes", 0, "host"), 4),
        (("nodes", 1, "address"), 7),  # not in the file: its node
        (("nodes", 5, "host"), 3),
        (("serve", "port"), 2),
    ],
)
def test_line_of(path: KeyPath, line: int) -> None:
    assert SOURCE.line_of(path) == line


def test_an_empty_file_begins_on_line_1() -> None:
    assert Source(Path("x"), {}).line_of(("name",)) == 1


def test_locate() -> None:
    assert SOURCE.locate(("nodes", 1, "address")) == "cluster.yaml:7: nodes[1].address"
    assert SOURCE.locate(()) == "cluster.yaml:2"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("serve", "args", "max-model-len"), "serve.args.max-model-len"),
        (("nodes", 0, "gpus"), "nodes[0].gpus"),
        (("runtime", "env", "a b"), 'runtime.env["a b"]'),
        (("", "x.y"), '[""]["x.y"]'),
        (("\x1b[2J\x9b\ud800",), '["\\u001b[2J\\u009b\\ud800"]'),
    ],
)
def test_render(path: KeyPath, text: str) -> None:
    assert render(path) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "empty"),
        (True, "true"),
        (8, "8"),
        (0.32, "0.32"),
        ("a", 'the text "a"'),
        ("x" * 100, 'the text "' + "x" * 60 + '…"'),
        ('"\n\x1b\x9b\u202e', 'the text "\\"\\n\\u001b\\u009b\\u202e"'),
        ([1], "a list"),
        ({}, "a mapping"),
        (Path(), "a PosixPath"),
    ],
)
def test_describe(value: object, text: str) -> None:
    assert describe(value) == text
