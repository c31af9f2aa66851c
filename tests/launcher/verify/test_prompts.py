"""The prompt set is the one pinned, has every kind, and files of prompts are read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtppp.errors import ConfigurationError
from mtppp.verify.prompts import KINDS, PINNED, coverage, fingerprint, own_set, read_file
from mtppp.verify.tiers import TIERS


def test_each_tier_has_its_prompts_pinned() -> None:
    assert set(PINNED) == {tier.requests for tier in TIERS.values()}
    prompts = own_set(max(PINNED))
    for count, pinned in PINNED.items():
        assert fingerprint(prompts[:count]) == pinned


def test_prompts_differ_and_have_all_kinds() -> None:
    prompts = own_set(max(PINNED))
    shown = {(p.text[: 3 * p.length], p.messages) for p in prompts}
    assert len(shown) > 0.99 * len(prompts)
    smoke = prompts[: TIERS["smoke"].requests]
    assert {p.kind for p in smoke} == set(KINDS)
    assert {p.length for p in smoke if p.kind == "long"} == {1024, 2048, 4096, 8192}
    assert all(len(p.text) == 6 * p.length for p in prompts)


def test_own_traffic_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [
        {"text": "Once"},
        {"messages": [{"role": "user", "content": "Hello"}], "kind": "chat"},
        {"token_ids": [0, 5]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    text, chat, ids = read_file(file)
    assert (text.text, text.kind, text.key) == ("Once", "own", f"{file}:1")
    assert (chat.messages, chat.kind) == ((("user", "Hello"),), "chat")
    assert ids.ids == (0, 5)


def test_what_is_there_twice_is_asked_once(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"text": "Once"}\n{"text": "Twice"}\n{"text": "Once", "kind": "again"}\n')
    assert [(p.key, p.text) for p in read_file(file)] == [
        (f"{file}:1", "Once"),
        (f"{file}:2", "Twice"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "x"}',
        '{"text": 3}',
        '{"text": ""}',
        '{"text": "a", "token_ids": [1]}',
        '{"token_ids": [1, "2"]}',
        '{"messages": ["hi"]}',
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(f'{{"text": "Once"}}\n{line}')
    with pytest.raises(ConfigurationError, match="not a prompt") as caught:
        read_file(file)
    assert f"{file}:2" in caught.value.message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="has no prompts"):
        read_file(file)


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no\.jsonl"):
        read_file(tmp_path / "no.jsonl")


def test_coverage_counts_kinds_and_lengths() -> None:
    counted = coverage([("prose", 20), ("prose", 40), ("long", 3000)])
    assert counted["kinds"] == {"prose": 2, "long": 1}
    assert counted["tokens"] == {"0-31": 1, "32-256": 1, "257-2048": 0, "2049-": 1}
    assert counted["longest"] == 3000
    missing = counted["not_covered"]
    assert missing["tokens"] == ["257-2048"]
    assert missing["kinds"] == [kind for kind in KINDS if kind not in ("prose", "long")]


def test_the_set_covers_itself() -> None:
    lengths = [(p.kind, p.length or 60) for p in own_set(TIERS["smoke"].requests)]
    assert coverage(lengths)["not_covered"] == {"kinds": [], "tokens": []}
