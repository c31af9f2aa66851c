#!/usr/bin/env python3
"""Show how often `mtppp verify` is wrong, and what it sees, on recorded answers of a real server.

    scripts/verify_power.py                       2,000 simulated runs without a fault, and more
    scripts/verify_power.py --over-http 20        so many whole runs over HTTP for each fault

The first draws prompts anew from the recording for each run (tests/data/verify-null.jsonl.gz), once
for the candidate and once for the baseline, of the same kind; damaged tokens get gaps that the
real server gave to damaged tokens. The second runs the command itself between servers that replay
the recording; a fault befalls the candidate's answers on their way. Both print rows of a table, and
put them into docs/verify-power.md between its marks; rows of faults that were not run stay. Exit
status 1 if a sound deployment fails too often, or `--over-http` passes a fault that the power
calculation says is seen.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / "launcher"),
    str(ROOT / "patches"),
    str(ROOT / "scripts"),
    str(ROOT / "tests/launcher/verify"),
]

from replay import Recorded, Replay, recording  # noqa: E402

from mtppp.verify.measure import Judged, Pair  # noqa: E402
from mtppp.verify.power import Design, Power  # noqa: E402
from mtppp.verify.prompts import own_set  # noqa: E402
from mtppp.verify.run import Settings  # noqa: E402
from mtppp.verify.servers import Server  # noqa: E402
from mtppp.verify.session import Outcome, verify  # noqa: E402
from mtppp.verify.tiers import HARD_GAP, TIERS  # noqa: E402
from mtppp.verify.verdict import Control, Direction, Evidence, decide, measure  # noqa: E402
from verify_faults import Fault, faults  # noqa: E402

PAGE = ROOT / "docs/verify-power.md"
SMOKE = TIERS["smoke"]
HEAD = (
    "| damage | runs | FAIL | INCONCLUSIVE | PASS | FAIL, predicted | PASS, predicted | date |",
    "|---|---|---|---|---|---|---|---|",
)
FALSE_FAIL = 0.002
FAULTY_RUNS = 300
SAMPLED_DAMAGE = 0.05
NOISE = (0.0, 1e-4, 1e-3)
"""Outliers per token that are added to the recorded ones, on both sides alike."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--over-http", type=int, metavar="N")
    parser.add_argument("--faults", default="", help="only these, separated by commas")
    arguments = parser.parse_args()
    others = [one.tokens for one in recording().all if len(one.tokens) >= 16]
    known = faults(recording().head["vocabulary"], others)
    names = arguments.faults.split(",") if arguments.faults else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.over_http:
        return over_http(known, names, arguments.over_http)
    return simulated(arguments.runs)


def simulated(runs: int) -> int:
    """Simulate; whether sound deployments fail seldom enough."""
    rows, right = [], True
    cases: list[tuple[str, float, float, float, int]] = [
        (f"none; noise {noise:g} per token", noise, 0.0, 0.0, runs) for noise in NOISE
    ]
    cases += [
        (f"{share * 100:g} % of tokens damaged", 1e-4, share, 0.0, FAULTY_RUNS)
        for share in (0.001, 0.002, 0.005, 0.01)
    ]
    cases += [
        (f"{share * 100:g} % of requests ruined", 1e-4, 0.0, share, FAULTY_RUNS)
        for share in (0.01, 0.05)
    ]
    for index, (what, noise, damaged, ruined, count) in enumerate(cases):
        chance = random.Random(index)
        outcomes: Counter[str] = Counter()
        designs = []
        for _ in range(count):
            evidence = one_run(chance, noise, damaged, ruined)
            figures = measure(evidence)
            outcomes[decide(evidence, figures)[0]] += 1
            designs.append(
                Design(SMOKE, figures.requests, figures.tokens, noise, figures.sensitivity)
            )
        if not damaged and not ruined:
            right &= outcomes["FAIL"] <= FALSE_FAIL * count
        design = designs[0]
        power = design.of_requests(ruined, design.requests) if ruined else design.of_tokens(damaged)
        rows.append(row(what, count, outcomes, power))
        print(rows[-1], flush=True)
        keep("simulated", rows, [case[0] for case in cases])
    return 0 if right else 1


def row(what: str, count: int, outcomes: Counter[str], power: Power | None) -> str:
    """A line of a table."""
    shares = " | ".join(
        f"{outcomes[outcome] / count:.2%}" for outcome in ("FAIL", "INCONCLUSIVE", "PASS")
    )
    predicted = f"{power.fails:.1%} | {1 - power.not_passed:.1%}" if power else " | "
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"| {what} | {count} | {shares} | {predicted} | {date} |"


def one_run(chance: random.Random, noise: float, damaged: float, ruined: float) -> Evidence:
    """A run of the smoke tier, its prompts drawn anew from those recorded."""
    by_kind: dict[str, list[Recorded]] = {}
    for one in recording().all:
        by_kind.setdefault(one.key.rpartition("-")[0], []).append(one)
    pairs = []
    for index in range(SMOKE.requests):
        kind = chance.choice(recording().all).key.rpartition("-")[0]
        ours, theirs = chance.choice(by_kind[kind]), chance.choice(by_kind[kind])
        candidate = judged(ours, chance, noise, damaged)
        if chance.random() < ruined:
            candidate = Judged(candidate.tokens, (0, 1, 2), (0, 1, 2), 3.0, frozenset())
        pairs.append(Pair(str(index), kind, candidate, judged(theirs, chance, noise, 0.0)))
    made = {0.001: 50, 0.01: max(50, sum(p.null.tokens for p in pairs) // 100)}
    seen = {
        share: sum(any(gap > HARD_GAP for gap in damage(chance)) for _ in range(count))
        for share, count in made.items()
    }
    return Evidence(
        tier=SMOKE,
        pairs=pairs,
        above=HARD_GAP,
        control=Control(made, seen, True, 20, 20),
        alone=Direction(0, 0),
    )


def judged(recorded: Recorded, chance: random.Random, noise: float, damaged: float) -> Judged:
    outliers = tuple(
        i
        for i, gap in enumerate(recorded.gap)
        if gap > HARD_GAP
        or chance.random() < noise
        or (damaged and chance.random() < damaged and max(damage(chance)) > HARD_GAP)
    )
    return Judged(len(recorded.gap), outliers, outliers, sum(recorded.gap), frozenset())


def damage(chance: random.Random) -> Sequence[float]:
    """Gaps that the real server gave to a damaged token and the one after it."""
    return chance.choice(recording().damaged)[0]


def over_http(known: Mapping[str, Fault], names: Sequence[str], runs: int) -> int:
    """Run the command; whether what it surely sees was never passed."""
    rows, right = [], True
    with Servers() as servers:
        for name in names:
            fault = known[name]
            outcomes: Counter[str] = Counter()
            causes: Counter[str] = Counter()
            design: Design | None = None
            sampled: Mapping[float, float] = {}
            for seed in range(runs):
                outcome = servers.compare(fault, seed)
                outcomes[outcome.verdict.outcome] += 1
                causes[outcome.verdict.cause] += 1
                figures = outcome.verdict.figures
                sampled = outcome.verdict.sampled_power
                if figures.tokens and design is None:
                    sizes = figures.requests, figures.tokens
                    design = Design(SMOKE, *sizes, 0.0, figures.sensitivity)
            power = None
            if fault.sampled:
                # Nothing else depends on what is sampled.
                power = Power(sampled[SAMPLED_DAMAGE], sampled[SAMPLED_DAMAGE])
            elif design and fault.tokens:
                power = design.of_tokens(fault.tokens)
            elif design and fault.requests:
                power = design.of_requests(fault.requests, design.requests)
            if power and power.not_passed > 0.999 and outcomes["PASS"]:
                right = False
            if name == "none" and outcomes["FAIL"]:
                right = False
            rows.append(row(fault.what, runs, outcomes, power))
            print(rows[-1], dict(causes), flush=True)
            keep("over HTTP", rows, [each.what for each in known.values()])
    return 0 if right else 1


class Servers:
    """A candidate and a baseline.

    The baseline's own answers and scores are the same in every run: the first run's record has
    them, and the others go on with that part of it, as after an interruption.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="verify-power-")
        self._candidate, self._baseline = Replay(), Replay()
        self._begun: dict[str, str] = {}
        self._runs = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._candidate.stop()
        self._baseline.stop()
        self._directory.cleanup()

    def compare(self, fault: Fault, seed: int) -> Outcome:
        """A run with this fault."""
        self._candidate.seed = seed
        self._candidate.fault = None if fault.sampled else fault.change
        self._candidate.sampled_fault = fault.change if fault.sampled else None
        self._candidate.calls_finished = fault.calls_finished
        self._baseline.shifted = fault.shifted
        directory = Path(self._directory.name) / str(self._runs)
        directory.mkdir()
        for name, text in self._begun.items():
            (directory / name).write_text(text)
        outcome = verify(
            directory,
            Settings(SMOKE),
            own_set(SMOKE.requests),
            candidate=Server("candidate", self._candidate.url),
            baseline=Server("baseline", self._baseline.url),
            about={},
            progress=lambda *_: None,
        )
        if not self._begun and not fault.shifted:
            self._keep(directory)
        self._runs += 1
        self._candidate.asked.clear()
        self._baseline.asked.clear()
        return outcome

    def _keep(self, directory: Path) -> None:
        lines = (directory / "record.jsonl").read_text().splitlines(keepends=True)
        of_baseline = re.compile(
            r'{"stage":("prompt"|"null"|"alone"|"score/(null|alone|control.*|ruin)"'
            r'|"note","key":"tokenizer")'
        )
        self._begun = {
            "manifest.json": (directory / "manifest.json").read_text(),
            "record.jsonl": "".join(line for line in lines if of_baseline.match(line)),
        }


def keep(mark: str, rows: Sequence[str], order: Sequence[str], head: Sequence[str] = HEAD) -> None:
    """Put rows of a table between its marks in the page, in place of those of the same damage."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, _, rest = text.partition(begin)
    table, _, after = rest.partition(end)
    table = merged(table, rows, order, head)
    PAGE.write_text(before + begin + table + end + after, encoding="utf-8")


def merged(
    table: str, rows: Sequence[str], order: Sequence[str], head: Sequence[str] = HEAD
) -> str:
    """A table with rows put in or replaced, in this order of what was damaged."""
    by_damage = {row.split("|")[1].strip(): row for row in (*table.splitlines()[2:], *rows)}
    return "".join(
        f"{line}\n" for line in (*head, *(by_damage[what] for what in order if what in by_damage))
    )


if __name__ == "__main__":
    sys.exit(main())
