#!/usr/bin/env python3
"""Examine a release of vLLM and propose its rows of patches/mtppp_patches/support.json.

    scripts/support_release.py 0.34.0

1. Compares what the patches replace or lean on with the newest release known before it.
2. Makes GLM-5.2's published configuration with the release's own classes.
3. Runs each demo model over stages against one stage (`relay_matrix.py`), with the patches that
   are for this release; a release that no patch names runs as it ships.

Prints what it found on stderr and the rows as JSON on stdout; results of step 3 are written to
patches/evidence. Changes no source: whoever adds the release reads first what has changed, names it
in `releases.py` and in the patches, and records fingerprints with `fingerprint_sources.py`. An hour
on two CPU cores. Exit status: 0 all of it right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "scripts")]

from mtppp_patches.fingerprint import SourceNotFoundError, fingerprint  # noqa: E402
from mtppp_patches.patch import known_fingerprints  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from mtppp_patches.releases import RELEASES  # noqa: E402
from relay_matrix import environment, say  # noqa: E402

MODELS = ("demo-glm4-moe", "demo-deepseek-v3")
DTYPES = {"demo-glm4-moe": "float32", "demo-deepseek-v3": "bfloat16"}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    release, models = arguments.release, arguments.models.split(",")

    python = environment(release)
    for line in changes(release, package_root(python)):
        say(line)
    gate = subprocess.run(
        [
            ROOT / "scripts/config_gate.py",
            "--published-only",
            "--output=/dev/null",
            f"{release}={python}",
        ],
        check=False,
    )
    say(f"configuration of GLM-5.2: {'as it must be' if gate.returncode == 0 else 'WRONG'}")
    rows = {}
    for model in models:
        output = ROOT / "patches/evidence" / f"{release}-{model}.json"
        subprocess.run(
            [
                ROOT / "scripts/relay_matrix.py",
                release,
                ROOT / "cluster_configs/models" / model,
                f"--dtype={DTYPES[model]}",
                f"--output={output}",
            ],
            check=False,
        )
        model_type, row = proposal(json.loads(output.read_text()), output)
        rows[model_type] = row
    print(json.dumps({release: rows}, indent=1))
    right = gate.returncode == 0 and all(row["decode"] != "broken" for row in rows.values())
    return 0 if right else 1


def package_root(python: Path) -> Path:
    """The directory of the package vllm in an environment."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def changes(release: str, root: Path) -> Iterator[str]:
    """One line per target whose source is not the one of the release before."""
    before = max((r for r in RELEASES if version(r) <= version(release)), key=version)
    yield f"compared with {before}:"
    for patch in PATCHES:
        for target in patch.targets:
            known = known_fingerprints().get(target.name, {}).get(before)
            try:
                now = fingerprint(root, target.module, target.attribute)
            except SourceNotFoundError:
                now = None
            if now != known:
                what = "gone" if now is None else "new" if known is None else "changed"
                yield f"  {what}: {target.name} ({patch.name})"


def version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def proposal(result: dict[str, Any], record: Path) -> tuple[str, dict[str, Any]]:
    """model_type and its row, from a result of `relay_matrix.py`."""
    release, model_type = result["release"], result["model_type"]
    patched = any(p.scope == "decode" and release in p.releases for p in PATCHES)
    evidence = {
        "level": "engine",
        "on": model_type,
        "date": result["date"],
        "record": str(record.relative_to(ROOT)),
    }
    decode = "broken" if not result["right"] else "patched" if patched else "native"
    return model_type, {"decode": decode, "evidence": {"decode": evidence}}


if __name__ == "__main__":
    sys.exit(main())
