"""Baselines on disk: their size in memory, and answers that have no token."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from mtppp.engine.bulk import Answer
from mtppp.verify.record import SCHEMA, Likeliest, Record
from mtppp.verify.stored import free_pairs

MANIFEST = {"schema": SCHEMA, "tier": "smoke", "prompts": 8, "prompts_sha256": ""}


def test_a_position_is_read_back() -> None:
    positions = [{7: -0.1, 9: -3.25}, {}, {100_000: -0.5}]
    kept = Likeliest(positions)
    assert list(kept) == positions
    assert [kept.at(i) for i in range(3)] == positions


def test_a_million_positions_fit_into_memory(tmp_path: Path) -> None:
    """A soak run's baseline has one, of nine tokens each."""
    positions = [{1000 * i + j: -0.5 * j for j in range(9)} for i in range(512)]
    record = Record.open(tmp_path, MANIFEST)
    for number in range(8):
        record.add_likeliest(f"p{number}", positions)
    del record, positions
    tracemalloc.start()
    try:
        read, _ = Record.read(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count = sum(len(list(one)) for one in read.likeliest.values())
    assert count == 8 * 512
    assert held / count < 250, "bytes for each position"
    assert peak - held < 3_000_000, "one line at a time"


def test_answers_without_a_token_are_compared(tmp_path: Path) -> None:
    baseline, record = Record(tmp_path), Record(tmp_path)
    answers = {"a": Answer((), "stop"), "b": Answer((7, 8), "length")}
    baseline.prompts = dict.fromkeys(answers, ("prose", (1, 2)))
    baseline.answers = {"null": answers, "again": answers}
    baseline.likeliest = {"b": Likeliest([{7: -0.1, 9: -3.0}, {8: -0.2, 5: -2.0}])}
    record.answers = {"candidate": {"a": Answer((7,), "length"), "b": Answer((7, 5), "length")}}
    empty, parted = free_pairs(record, baseline, 1.0, 2)
    assert (empty.candidate.tokens, empty.null.flags) == (0, {"empty"})
    assert (parted.candidate.outliers, parted.null.outliers) == ((1,), ())
