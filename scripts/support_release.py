#!/usr/bin/env python3
"""Examine a release of vLLM and propose its rows of patches/mtppp_patches/support.json.

    scripts/support_release.py 0.34.0
    scripts/support_release.py 0.34.0 --on 0.33.0      # without a build for CPUs
    scripts/support_release.py 0.34.0 --dtype bfloat16 # where CPUs cannot run float32
    scripts/support_release.py 0.34.0 --models demo-glm4-moe --candidates pp2-k3 --scenarios ends

1. Compares what the patches replace or lean on with the newest release known before it.
2. Makes GLM-5.2's published configuration, and the smallest of each family with MTP, with the
   release's own classes.
3. Runs the release's model classes in process groups (`class_evidence.py`).
4. Runs each demo model over stages against one stage (`relay_matrix.py`), with the patches that
   are for this release; a release that no patch names runs as it ships.
5. Runs both faults of GLM-5.2's stages in engines (`stage_evidence.py`).

Says on stderr what it found; the rows are JSON on stdout, and the records they cite are written to
patches/evidence. With --models, --candidates or --scenarios a part is run: its records go to a
temporary directory, and a part proposes no row.

Changes no source: whoever adds the release reads first what has changed, names it in `releases.py`
and in the patches, and records fingerprints with `fingerprint_sources.py`. Two hours on two CPU
cores. Exit status: 0 all that was run is right, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches"), str(ROOT / "scripts")]

import class_evidence  # noqa: E402
from mtppp_patches.fingerprint import SourceNotFoundError, fingerprint  # noqa: E402
from mtppp_patches.patch import known_fingerprints  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from mtppp_patches.releases import RELEASES  # noqa: E402
from mtppp_patches.support import DECODE, Evidence, Level, must_be_proven  # noqa: E402

MODELS = ("demo-glm4-moe", "demo-deepseek-v3", "demo-glm-moe-dsa")
PRECISION = "float32"
"""In which layouts differ by hardly more than nothing, and a row needs no remark."""

DEEPSEEK_MTP = "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP"
DEEPSEEK_V32_MTP = "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP"
DRAFTERS = {
    "glm4_moe": (("0.23.0", "vllm.model_executor.models.glm4_moe_mtp:Glm4MoeMTP"),),
    "deepseek_v3": (("0.23.0", DEEPSEEK_MTP),),
    "deepseek_v32": (("0.23.0", DEEPSEEK_MTP), ("0.29.0", DEEPSEEK_V32_MTP)),
    "glm_moe_dsa": (("0.23.0", DEEPSEEK_MTP), ("0.29.0", DEEPSEEK_V32_MTP)),
}
"""The families that rows are proposed for, and the drafter's class from a release on."""

NEAREST = {"deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3"}
"""Families that vLLM runs on GPUs alone, and what decodes most like them of those it does not."""

KINDS: Mapping[Level, str] = {"class": "classes", "engine": "stages"}
"""What the record of patches beyond decoding is called, by how they were shown."""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--on", metavar="RELEASE", help="whose compiled parts to use")
    parser.add_argument("--dtype", default=PRECISION, help="see relay_matrix.py")
    parser.add_argument("--models", help="of the demo models, only these")
    parser.add_argument("--candidates", help="see relay_matrix.py")
    parser.add_argument("--scenarios", help="see relay_matrix.py")
    arguments = parser.parse_args()
    part = any((arguments.models, arguments.candidates, arguments.scenarios))
    if not part:
        return examine(arguments, ROOT / "patches/evidence", part=False)
    with tempfile.TemporaryDirectory(prefix="support-release-") as directory:
        return examine(arguments, Path(directory), part=True)


def examine(arguments: argparse.Namespace, records: Path, *, part: bool) -> int:
    """Run what is asked for; the exit status."""
    release = arguments.release
    python = class_evidence.python_of(release, arguments.on)
    for line in changes(release, package_root(python)):
        say(line)

    gate = [ROOT / "scripts/config_gate.py", "--output=/dev/null"]
    gate_right = succeeds(*gate, f"{release}={python}")
    say(f"configurations: {'as it must be' if gate_right else 'WRONG'}")

    classes = class_evidence.examine(release, python, arguments.on)
    (records / f"{release}-classes.json").write_text(class_evidence.text_of(classes), "utf-8")
    for patch, problems in classes["problems"].items():
        shown = ", ".join(classes["shows"].get(patch, ())) or "nothing"
        say(f"classes, {patch}: {'; '.join(problems) or f'shown for {shown}'}")

    engines = []
    for model in (arguments.models or ",".join(MODELS)).split(","):
        output = records / f"{release}-{model}.json"
        part_of = {name: getattr(arguments, name) for name in ("candidates", "scenarios")}
        options = [f"--{name}={value}" for name, value in part_of.items() if value]
        options += [f"--dtype={arguments.dtype}", f"--output={output}"]
        options += [f"--on={arguments.on}"] if arguments.on else []
        succeeds(
            ROOT / "scripts/relay_matrix.py",
            release,
            ROOT / "cluster_configs/models" / model,
            *options,
        )
        if output.exists():
            engines.append(json.loads(output.read_text(encoding="utf-8")))
        say(f"engines, {model}: {verdict_of(engines[-1]) if output.exists() else 'NO RESULT'}")

    right = gate_right and not any(classes["problems"].values())
    right = right and len(engines) > 0 and all(engine["right"] for engine in engines)
    if part:
        say("a part was run: it proposes no row")
        return 0 if right else 1

    output = records / f"{release}-stages.json"
    options = [f"--on={arguments.on}"] if arguments.on else []
    stages_right = succeeds(ROOT / "scripts/stage_evidence.py", release, *options)
    say(f"stages: {'as they must be' if stages_right else 'WRONG'}")
    stages = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
    print(json.dumps({release: proposal(release, classes, engines, stages)}, indent=1))
    return 0 if right and stages_right else 1


def proposal(
    release: str,
    classes: Mapping[str, Any],
    engines: Sequence[Mapping[str, Any]],
    stages: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The rows of a release, from what was recorded of it. Pure.

    A family that vLLM runs on GPUs alone, and that no engine ran, decodes as another does, on the
    same path; what else it needs of the patches is in `classes` and, shown in engines, `stages`.
    """
    ran = {engine["model_type"]: engine for engine in engines if could_run(engine)}
    rows: dict[str, dict[str, Any]] = {}
    for model_type in DRAFTERS:
        engine = ran.get(model_type)
        if engine is None and model_type in NEAREST:
            engine = stand_in(model_type, ran)
        if engine is None:
            continue
        record = f"patches/evidence/{release}-{engine['model']}.json"
        evidence = {DECODE: Evidence("engine", engine["model_type"], engine["date"], record)}
        # What an engine showed takes the place of what its classes did.
        for level, shown in (("class", classes), ("engine", stages or {"shows": {}})):
            record = f"patches/evidence/{release}-{KINDS[level]}.json"
            for patch, families in shown["shows"].items():
                if model_type in families and must_be_proven(patch, model_type):
                    evidence[patch] = Evidence(level, model_type, shown["date"], record)
        patched = any(p.scope == "decode" and release in p.releases for p in PATCHES)
        rows[model_type] = {
            "drafter": drafter_of(model_type, release),
            "decode": "broken" if not engine["right"] else "patched" if patched else "native",
            "evidence": {key: asdict(item) for key, item in evidence.items()},
        }
        if remarks := list(_remarks(release, model_type, engine)):
            rows[model_type]["note"] = "; ".join(remarks)
    return rows


def _remarks(release: str, model_type: str, engine: Mapping[str, Any]) -> Iterator[str]:
    """In what the engine that ran was not the one that will serve, and what it did not run."""
    if engine["model_type"] != model_type:
        yield (
            "the model itself needs GPUs to run: shown are its classes, and decoding with another "
            "model"
        )
    elif model_type in NEAREST:
        yield "it ran without GPUs: vLLM's generic class, with sparse attention in plain torch"
    compiled = engine.get("compiled_parts", release)
    if compiled != release:
        yield f"{release} has no build for CPUs: its own Python ran on {compiled}'s compiled parts"
    if engine["dtype"] != PRECISION:
        yield f"in {engine['dtype']}"
    yield from circumstances(engine)


def circumstances(record: Mapping[str, Any]) -> Iterator[str]:
    """With what variables engines of a record ran, and what they were not put through, by reason.

    Args:
        record: of `scripts/relay_matrix.py`, in patches/evidence.
    """
    if variables := record.get("variables"):
        yield f"with {', '.join(f'{name}={value}' for name, value in variables.items())}"
    left_out: Mapping[str, str] = record.get("left_out", {})
    for why in dict.fromkeys(left_out.values()):
        scenarios = [name.replace("_", " ") for name in left_out if left_out[name] == why]
        yield f"not run: {', '.join(scenarios)} ({why})"


def could_run(engine: Mapping[str, Any]) -> bool:
    """Whether the references ran, without stages: else the host is not one for this family."""
    return not any("failed" in arm for arm in engine["arms"].values() if arm["pipeline"] == 1)


def stand_in(model_type: str, ran: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The engine that shows how a family decodes which did not run: the nearest that was right."""
    right = {name: engine for name, engine in ran.items() if engine["right"]}
    return right.get(NEAREST.get(model_type, "")) or next(iter(right.values()), None)


def drafter_of(model_type: str, release: str) -> str:
    """module:Class of the drafter that a family has on a release."""
    since = [name for first, name in DRAFTERS[model_type] if version(first) <= version(release)]
    return since[-1]


def verdict_of(engine: Mapping[str, Any]) -> str:
    wrong = [name for name, arm in engine["arms"].items() if not arm["right"]]
    return f"WRONG: {', '.join(wrong)}" if wrong else f"right: {', '.join(engine['arms'])}"


def succeeds(*command: str | Path) -> bool:
    return subprocess.run(command, check=False, stdout=sys.stderr).returncode == 0


def package_root(python: Path) -> Path:
    """The directory of the package vllm in an environment."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def changes(release: str, root: Path) -> Iterator[str]:
    """One line per target whose source is not the one of the newest release before."""
    before = max((r for r in RELEASES if version(r) < version(release)), key=version, default=None)
    if before is None:
        yield f"nothing is known of a release before {release}"
        return
    yield f"compared with {before}:"
    for patch in PATCHES:
        for target in patch.targets:
            if before not in (target.releases or patch.releases):
                continue
            try:
                now = fingerprint(root, target.module, target.attribute)
            except SourceNotFoundError:
                yield f"  gone: {target.name} ({patch.name})"
                continue
            if now != known_fingerprints()[target.name][before]:
                yield f"  changed: {target.name} ({patch.name})"


def version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
