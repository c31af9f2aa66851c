"""Records: read back as written, gone on with after an interruption, refused when not ours."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from mtppp.engine.bulk import Answer, Scores
from mtppp.errors import ConfigurationError, MtpppError
from mtppp.verify.record import SCHEMA, Record
from mtppp.verify.session import recorded_tier

MANIFEST = {"schema": SCHEMA, "tier": "smoke"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A record with one of everything."""
    record = Record.open(tmp_path / "run", MANIFEST)
    record.add_prompt("p", "prose", (0, 5))
    record.add_answer("candidate", "p", Answer((7, 8), "length"))
    scores = Scores(
        array("d", [0.0, 2.5]), array("l", [1, 4]), array("l", [7, 9]), array("d", [-0.5, -3])
    )
    record.add_scores("candidate", "p", scores)
    record.note("tokenizer", {"differs": []})
    return tmp_path / "run"


def test_a_record_is_read_back(directory: Path) -> None:
    record = Record.open(directory, MANIFEST)
    assert record.prompts == {"p": ("prose", (0, 5))}
    assert record.answers["candidate"]["p"] == Answer((7, 8), "length")
    scores = record.scores["candidate"]["p"]
    assert (list(scores.gap), list(scores.rank), list(scores.best)) == ([0, 2.5], [1, 4], [7, 9])
    assert record.notes["tokenizer"] == {"differs": []}


def test_half_a_line_is_forgotten(directory: Path) -> None:
    file = directory / "record.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"stage": "null", "key": "p", "tok')
    record = Record.open(directory, MANIFEST)
    assert "null" not in record.answers
    record.add_answer("null", "p", Answer((7,), "stop"))
    again = Record.open(directory, MANIFEST)
    assert again.answers["null"]["p"] == Answer((7,), "stop")


def test_another_run_is_not_gone_on_with(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="another run: tier differ"):
        Record.open(directory, MANIFEST | {"tier": "soak"})


@pytest.mark.parametrize(
    "line",
    [
        b'{"stage": 3}',
        b'{"stage": "likeliest", "key": "p", "positions": [[[1]]]}',
        b'{"stage": "score/null", "key": "p", "gap": [], "rank": [%d], "best": [], "logprob": []}'
        % 10**30,
        b"[" * 100_000,
    ],
    ids=["no stage", "no pair", "too large", "too deep"],
)
def test_a_changed_file_is_refused(directory: Path, line: bytes) -> None:
    file = directory / "record.jsonl"
    file.write_bytes(line + b"\n" + file.read_bytes())
    with pytest.raises(ConfigurationError, match=r"record\.jsonl:1: not a line"):
        Record.open(directory, MANIFEST)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file/run"):
        Record.open(tmp_path / "file" / "run", MANIFEST)


def test_a_record_that_can_be_neither_read_nor_written(directory: Path) -> None:
    record = Record.open(directory, MANIFEST)
    (directory / "record.jsonl").unlink()
    (directory / "record.jsonl").mkdir()
    with pytest.raises(MtpppError, match=r"record\.jsonl: Is a directory") as caught:
        record.note("x", {})
    assert "goes on" in caught.value.hint
    with pytest.raises(ConfigurationError, match=r"record\.jsonl: Is a directory"):
        Record.open(directory, MANIFEST)


def test_a_manifest_that_is_not_whole_or_not_of_ours(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not tell prompts, prompts_sha256"):
        Record.read(directory)
    whole = MANIFEST | {"prompts": 1, "prompts_sha256": "", "tier": "gigantic"}
    (directory / "manifest.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigurationError, match="a tier that is not known, gigantic"):
        recorded_tier(directory)
