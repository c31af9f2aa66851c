"""What `mtppp status` shows a person."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtppp.cli.status import show
from mtppp.phases.status import DeploymentStatus

SERVING = DeploymentStatus(
    name="demo",
    state="serving",
    explanation="a token came",
    checked="T",
    gate="open",
    gate_why="PASS",
    endpoint="http://10.0.0.1:8000",
    reachable=True,
    asked="through ssh",
    seconds_to_token=0.5,
    evidence="engine",
    at_own_risk=(),
    invariants="count",
    violations={},
    violated=(),
    nodes=(),
    ranks=[
        {"rank": i, "stage": i, "tensor_rank": 0, "node": host, "pid": 1, "alive": True}
        | {"layers": [i], "drafter": None, "patches": {}}
        for i, host in enumerate("ab")
    ],
)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (SERVING, False),
        (replace(SERVING, invariants="off"), True),
        # With one stage there is nothing to compare.
        (replace(SERVING, invariants="off", ranks=SERVING.ranks[:1]), False),
    ],
)
def test_stages_that_are_not_compared_are_told(
    status: DeploymentStatus, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show(status)
    assert ("no invariants are watched" in capsys.readouterr().out) == told


def test_what_goes_ahead_at_ones_own_risk_is_not_called_proven(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(SERVING)
    sound = capsys.readouterr().out
    show(replace(SERVING, evidence="not proven", at_own_risk=("unlisted_family",)))
    risky = capsys.readouterr().out
    assert "proven by" in sound
    assert "proven by" not in risky
    assert "AT YOUR OWN RISK" not in sound
    assert "AT YOUR OWN RISK, not proven to be right: unlisted_family" in risky
