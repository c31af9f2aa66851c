#!/usr/bin/env python3
"""Record the fingerprints of what the patches replace or lean on, from vLLM's sources.

    scripts/fingerprint_sources.py 0.29.0=/path/to/vllm 0.30.0=/other/vllm ...
    scripts/fingerprint_sources.py --check 0.29.0=/path/to/vllm

A path is the directory of the package `vllm` of an unmodified release, unzipped or installed.
Without --check, rewrites patches/mtppp_patches/fingerprints.json: fingerprints of the given
releases are replaced, others kept, and those of targets that no patch names are dropped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "patches"))

from mtppp_patches.fingerprint import fingerprint  # noqa: E402
from mtppp_patches.patch import known_fingerprints  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402

FILE = ROOT / "patches/mtppp_patches/fingerprints.json"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Record fingerprints of vLLM's sources.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 on difference")
    parser.add_argument("sources", nargs="+", metavar="RELEASE=DIRECTORY")
    arguments = parser.parse_args()
    roots = {}
    for source in arguments.sources:
        release, _, directory = source.partition("=")
        roots[release] = Path(directory)

    text = json.dumps(record(roots), indent=1, sort_keys=True) + "\n"
    if text == FILE.read_text(encoding="utf-8"):
        return 0
    if arguments.check:
        print(f"{FILE} differs from these sources", file=sys.stderr)
        return 1
    FILE.write_text(text, encoding="utf-8")
    return 0


def record(roots: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Target name -> release -> fingerprint, of all targets of all patches."""
    result: dict[str, dict[str, str]] = {}
    for patch in PATCHES:
        for target in patch.targets:
            known = known_fingerprints().get(target.name, {})
            recorded = result.setdefault(target.name, {})
            for release in target.releases or patch.releases:
                if release in roots:
                    root = roots[release]
                    recorded[release] = fingerprint(root, target.module, target.attribute)
                elif release in known:
                    recorded[release] = known[release]
    return result


if __name__ == "__main__":
    sys.exit(main())
