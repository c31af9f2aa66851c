from __future__ import annotations

import yaml

from mtppp.cluster.writing import write_yaml


def test_sections_comments_and_flags() -> None:
    text = write_yaml(
        {
            "name": "x",
            "nodes": [{"host": "a", "address": "10.0.0.1"}],
            "runtime": {"vllm": "0.32.0", "env": {"A": "1", "B": "a: b"}},
            "serve": {"args": {"x": {"y": {"z": True}}, "sizes": [1, 2], "empty": None}},
            "secrets": ["T"],
        },
        {
            ("name",): "short",
            ("nodes",): "first\n\nlast",
            ("nodes", 0): "one",
            ("serve", "args", "x"): "long " * 30,
        },
        "Head.",
    )
    assert text == (
        "# Head.\n\n"
        "name: x # short\n\n"
        "# first\n#\n# last\n"
        "nodes:\n  - {host: a, address: 10.0.0.1} # one\n\n"
        'runtime:\n  vllm: "0.32.0"\n  env:\n    A: "1"\n    B: "a: b"\n\n'
        "serve:\n  args:\n"
        f"    # {' '.join(['long'] * 18)}\n    # {' '.join(['long'] * 12)}\n"
        "    x: {y: {z: true}}\n    sizes: [1, 2]\n    empty:\n\n"
        "secrets: [T]\n"
    )


def test_any_text_comes_back() -> None:
    values = [
        "a b",
        "yes",
        "0",
        "1e3",
        "it's",
        'say "x"',
        "back\\slash",
        "é",
        " pad ",
        "#c",
        "-",
        "",
    ]
    document = {"s": {f"k{i}": value for i, value in enumerate(values)}}
    assert yaml.safe_load(write_yaml(document, {})) == document
