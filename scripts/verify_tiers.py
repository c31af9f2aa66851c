#!/usr/bin/env python3
"""Run whole tiers of `mtppp verify` over HTTP, against servers whose model is a little arithmetic.

    scripts/verify_tiers.py                         certify, sound and with 1 token in 1,000 damaged
    scripts/verify_tiers.py --tiers soak --damage 0,0.0005

Shows what larger tiers do that smaller ones do not, at their full size: the number of requests and
of tokens, a threshold from the tail of the null, the memory that the client takes, the verdict. It
says nothing of an engine: tests/launcher/verify/arithmetic.py has the model. The rows go into
docs/verify-power.md. Exit status 1 when a sound one is no PASS, or a damaged one is.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT / part) for part in ("launcher", "patches", "scripts", "tests/launcher/verify")
]

from arithmetic import serve  # noqa: E402

from mtppp.console import Console  # noqa: E402
from mtppp.verify.prompts import own_set  # noqa: E402
from mtppp.verify.run import Settings  # noqa: E402
from mtppp.verify.servers import Server  # noqa: E402
from mtppp.verify.session import verify  # noqa: E402
from mtppp.verify.tiers import TIERS  # noqa: E402
from verify_power import keep  # noqa: E402

MARK = "whole tiers"
HEAD = [
    "| tier, damaged tokens | tokens judged | above | outliers | verdict | minutes | MiB | date |",
    "|---|---|---|---|---|---|---|---|",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tiers", default="certify", help="names, separated by commas")
    parser.add_argument("--damage", default="0,0.001", help="shares, separated by commas")
    arguments = parser.parse_args()
    rows, right = [], True
    shares = [float(share) for share in arguments.damage.split(",")]
    order = [_named(tier, share) for tier in TIERS for share in sorted({*shares, 0, 0.0005, 0.001})]
    for tier in arguments.tiers.split(","):
        for share in shares:
            row, verdict = whole(tier, share)
            right &= (verdict == "PASS") is (share == 0)
            rows.append(row)
            print(row, flush=True)
            keep(MARK, rows, order, HEAD)
    return 0 if right else 1


def whole(name: str, damaged: float) -> tuple[str, str]:
    """One run; its row of the table, and the verdict."""
    tier = TIERS[name]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="verify-tiers-") as directory,
        serving(1, damaged) as candidate,
        serving(2, 0.0) as baseline,
        Console().step(name) as step,
    ):
        outcome = verify(
            Path(directory),
            Settings(tier),
            own_set(tier.requests),
            candidate=Server("candidate", candidate),
            baseline=Server("baseline", baseline),
            about={},
            progress=step.count,
        )
    print("\n".join(outcome.lines), file=sys.stderr, flush=True)
    verdict, figures = outcome.verdict, outcome.verdict.figures
    said = f"{verdict.outcome}, {verdict.cause}" if verdict.cause else verdict.outcome
    cells = [
        _named(name, damaged),
        f"{figures.tokens:,} of {figures.requests} requests",
        f"{outcome.result['threshold_nats']:.2f} nat",
        f"{figures.outliers:,}",
        said,
        f"{(time.monotonic() - began) / 60:.0f}",
        # The largest so far: a smaller run does not come after a larger one.
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
        datetime.datetime.now(datetime.UTC).date().isoformat(),
    ]
    return f"| {' | '.join(cells)} |", verdict.outcome


def _named(tier: str, damaged: float) -> str:
    return f"{tier}, {f'1 in {1 / damaged:,.0f}' if damaged else 'none'}"


@contextmanager
def serving(seed: int, damaged: float) -> Iterator[str]:
    """A server in a process of its own; its URL."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(theirs, seed, damaged), daemon=True)
    process.start()
    theirs.close()  # a server that dies is noticed
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    sys.exit(main())
