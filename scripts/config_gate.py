#!/usr/bin/env python3
"""Reproduce vLLM's refusal of MTP under pipeline parallelism, and show that the patch lifts it.

    scripts/config_gate.py 0.29.0=ENVIRONMENT_PYTHON ...
    scripts/config_gate.py --python PYTHON 0.23.0=SOURCES ... 0.33.0=SOURCES

For each release: GLM-5.2's published configuration at TP8, PP2, 5 draft tokens, and the smallest
configuration of each MTP family at TP2, PP2. Real ModelConfig, ParallelConfig and SpeculativeConfig
of that release; no GPU, no weights and no compiled code. SOURCES is the directory of a release's
unzipped wheel; its python code then runs on the dependencies of --python.

Up to 0.29 GLM-5.2 must be refused as vLLM ships it and pass with the patch; from 0.30 on it must
pass as it ships. Every other family that the release knows must pass with the patch, and as it
ships from 0.30 on; a few drafters support pipelining and pass before. The result goes to
patches/evidence/config-gate.json unless --output says otherwise. Exit status: 0 as it must be,
1 otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches")]

from mtppp_patches import config_gate  # noqa: E402
from mtppp_patches.fingerprint import fingerprint_file  # noqa: E402

PUBLISHED = "glm_moe_dsa"
OUTPUT = ROOT / "patches/evidence/config-gate.json"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="runs the sources of every release")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("releases", nargs="+", metavar="RELEASE=WHERE")
    arguments = parser.parse_args()

    releases: dict[str, Any] = {}
    for item in arguments.releases:
        release, _, where = item.partition("=")
        releases[release] = {
            how: in_fresh_python(release, Path(where), arguments.python, how)
            for how in ("shipped", "patched")
        }
        print(release, json.dumps(releases[release]), file=sys.stderr, flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    patches = {"config_gate": fingerprint_file(Path(config_gate.__file__))}
    record = {"date": today, "command": "scripts/config_gate.py", "patches": patches}
    text = json.dumps(record | {"releases": releases}, indent=1) + "\n"
    arguments.output.write_text(text, encoding="utf-8")
    return 0 if all(as_it_must_be(*item) for item in releases.items()) else 1


def as_it_must_be(release: str, results: dict[str, dict[str, str]]) -> bool:
    """Whether GLM-5.2 is refused where it is known to be, and all pass everywhere else."""
    gated = release in config_gate.PATCH.releases
    shipped, patched = results["shipped"], results["patched"]
    if shipped.get(PUBLISHED) != ("refused" if gated else "passes"):
        return False
    right = {"passes", "unknown"}
    right_as_shipped = right | {"refused"} if gated else right
    return (
        shipped.keys() == patched.keys()
        and right_as_shipped.issuperset(shipped.values())
        and right.issuperset(patched.values())
    )


def in_fresh_python(release: str, where: Path, python: Path | None, how: str) -> dict[str, str]:
    """Outcome per model_type; what is patched and configured is a matter of the whole process."""
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": "" if python is None else str(where),
    }
    cases = ROOT / "scripts/config_gate_cases.py"
    command = [str(python or where), str(cases), release, how]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    outcome: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return outcome


if __name__ == "__main__":
    sys.exit(main())
