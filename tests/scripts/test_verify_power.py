"""The tables of docs/verify-power.md: rows that are run again take the place of the old ones."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "launcher" / "verify")]

from replay import recording  # noqa: E402, I001
from verify_faults import PAST_200, faults  # noqa: E402
from verify_power import HEAD, PAGE, merged  # noqa: E402


def test_rows_are_replaced_and_the_others_stay() -> None:
    table = "\n".join([*HEAD, "| b | 10 | old |", "| gone | 10 | old |", "| c | 10 | old |"])
    found = merged(table, ["| a | 20 | new |", "| b | 20 | new |"], ["a", "b", "c"])
    rows = [*HEAD, "| a | 20 | new |", "| b | 20 | new |", "| c | 10 | old |"]
    assert found == "\n".join(rows) + "\n"


def test_rows_of_the_page_are_of_known_faults_and_as_wide_as_their_head() -> None:
    whole = PAGE.read_text(encoding="utf-8")
    table = whole.partition("<!-- over HTTP -->\n")[2].partition("<!-- end of")[0]
    assert {line.count("|") for line in table.splitlines()} == {HEAD[0].count("|")}
    known = {fault.what for fault in faults(512, []).values()}
    assert {line.split("|")[1].strip() for line in table.splitlines()[2:]} <= known


def test_the_share_past_position_200_is_that_of_the_recording() -> None:
    places = [len(one.ids) + i for one in recording().all for i in range(len(one.tokens))]
    assert abs(sum(place >= 200 for place in places) / len(places) - PAST_200) < 0.001
