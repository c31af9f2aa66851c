"""What an engine counted of its invariants, on the metrics of its server.

That they fire in real engines on what they are for, and never otherwise, is in `test_relay.py`,
`test_relay_faults.py` and `test_invariants_served.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mtppp_patches.observations import (
    INVARIANTS,
    OWN_INDICES,
    Ledger,
    Place,
    Report,
)

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Python = Callable[[str], Path]


METRICS = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
from mtppp_patches.invariants import register_metrics
register_metrics(Path(sys.argv[1]))
print(generate_latest(get_prometheus_registry()).decode())
"""


def test_the_servers_metrics_tell_what_the_engine_counted(
    tmp_path: Path, vllm_python: Python
) -> None:
    ledger = Ledger()
    ledger.take([Report(Place(1, 0), 4, index_checks=5, foreign_indices=((3, 39),))])
    ledger.write(tmp_path)
    done = subprocess.run(
        [vllm_python("0.32.0"), "-c", METRICS, tmp_path],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "patches")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    for invariant in INVARIANTS:
        own = invariant == OWN_INDICES
        label = f'{{invariant="{invariant}"}}'
        assert f"mtppp_invariant_checks_total{label} {5.0 if own else 0.0}" in lines
        assert f"mtppp_invariant_violations_total{label} {1.0 if own else 0.0}" in lines
