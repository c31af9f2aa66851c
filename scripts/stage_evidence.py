#!/usr/bin/env python3
"""Run both faults of GLM-5.2's stages in real engines without a GPU, and put it on record.

    scripts/stage_evidence.py 0.32.0
    scripts/stage_evidence.py 0.32.0 --only index_share     # the others stay as they are

Runs the demo model demo-glm-moe-dsa, with an environment's python (`scripts/environment`), on two
tensor-parallel ranks by two stages:

- stage_boundary_float32, stage_boundary_bfloat16
                    vLLM's NVIDIA classes with their fused operators in plain torch (`tests/faults/
                    mtppp_gpu_classes`), as shipped, patched, and patched with MTP, and without
                    stages; their tokens are scored by vLLM's generic class in one process
- index_share       the generic class, stages cut before a layer with an indexer and within a group
                    of layers that share indices, with and without what stops the latter

Writes patches/evidence/RELEASE-stages.json: what each shows and every run's figures, to which
`tests/patches/test_support.py` holds support.json. Some ten minutes on two CPU cores. Exit status:
0 if all is as it must be, 1 otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / path) for path in ("launcher", "patches", "scripts", "tests/faults")]

from class_evidence import python_of, text_of  # noqa: E402
from cpu_engine import engine_environment  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Invariants  # noqa: E402
from mtppp_patches.fingerprint import fingerprint_file  # noqa: E402
from mtppp_patches.observations import OWN_INDICES, read_counts  # noqa: E402
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402

MODEL = ROOT / "cluster_configs/models/demo-glm-moe-dsa"
MODEL_TYPE = "glm_moe_dsa"
WORLDS = ROOT / "tests/patches"
LEGAL, WITHIN = "6,6", "7,5"
BOUNDARY = "stage_boundary"
DTYPES = ("float32", "bfloat16")
BOUNDARY_CASES = ("without_stages", "unpatched", "patched", "patched_mtp")

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.05}
"""By how much the generic class in float32 may prefer another token to one that is right, in nats:
what rounding of that precision makes of two tokens that are as good as equal."""

WRONG = 0.1
"""By how much it prefers another at least once to one that an engine as shipped gives."""

Run = Mapping[str, Any]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--only", choices=EXPERIMENTS, help="run one, keep the record's others")
    parser.add_argument("--on", metavar="RELEASE", help="whose compiled parts to use")
    parser.add_argument("--directory", type=Path, help="where engines leave their logs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    output = arguments.output or ROOT / f"patches/evidence/{arguments.release}-stages.json"
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="stages-"))
    kept = arguments.only and output.exists()
    runs = json.loads(output.read_text(encoding="utf-8"))["runs"] if kept else {}
    python = python_of(arguments.release, arguments.on)
    for name in [arguments.only] if arguments.only else EXPERIMENTS:
        runs[name] = EXPERIMENTS[name](python, arguments.release, directory / name)
        output.write_text(
            text_of(record_of(arguments.release, arguments.on, runs)), encoding="utf-8"
        )
    judged = verdict(runs)
    for name, problems in judged["problems"].items():
        print(
            f"{name}: {'not as it must be' if problems else 'as it must be'}", *problems, sep="\n  "
        )
    print(output, directory)
    return 1 if any(judged["problems"].values()) else 0


def record_of(release: str, base: str | None, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The content of the result file; `base`: whose compiled parts ran, if not the release's."""
    return {
        "level": "engine",
        "release": release,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "compiled_parts": base or release,
        "command": f"scripts/stage_evidence.py {release}" + (f" --on {base}" if base else ""),
        "model_type": MODEL_TYPE,
        "patches": {
            name: fingerprint_file(ROOT / f"patches/mtppp_patches/{name}.py")
            for name in (BOUNDARY, "index_share")
        },
        **verdict(runs),
        "runs": runs,
    }


def verdict(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """`shows`: patch -> model types it is shown for; `problems`: patch -> what speaks against it.

    Pure, so that a record can be judged again.
    """
    problems = {
        BOUNDARY: [
            problem
            for dtype in DTYPES
            for problem in boundary_problems(dtype, runs.get(f"{BOUNDARY}_{dtype}", ()))
        ],
        "index_share": [*index_problems(runs.get("index_share", ()))],
    }
    return {
        "shows": {name: [MODEL_TYPE] for name, found in problems.items() if not found},
        "problems": problems,
    }


def boundary_runs(dtype: str) -> Callable[[Path, str, Path], list[Run]]:
    def run(python: Path, release: str, directory: Path) -> list[Run]:
        return serve_boundary(python, dtype, directory)

    return run


def serve_boundary(python: Path, dtype: str, directory: Path, *cases: str) -> list[Run]:
    """What `boundary_engine_world.py` prints, one entry per engine; all cases if none are named.

    Raises:
        subprocess.CalledProcessError: it failed; its messages are on stderr.
    """
    packages = ["mtppp_faults", "mtppp_gpu_classes", "mtppp_patches", "mtppp_cpu"]
    done = subprocess.run(
        [
            python,
            WORLDS / "boundary_engine_world.py",
            MODEL,
            directory,
            dtype,
            *cases,
        ],
        env={**os.environ, **environment(packages, directory)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=4000,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def boundary_problems(
    dtype: str, runs: Sequence[Run], cases: Sequence[str] = BOUNDARY_CASES
) -> Iterator[str]:
    """What is not as it must be when an engine with stages serves what one without serves.

    Args:
        cases: those that must have run, with the patch and without it at least.
    """
    by_name = {entry["name"]: entry for entry in runs}
    for name in cases:
        if by_name.get(name, {"ended": True})["ended"]:
            yield f"{dtype} {name}: has not run to its end"
            return
    for entry in runs:
        yield from engine_problems(f"{dtype} {entry['name']}", entry, NEAR_TIE[dtype])
    if without := by_name.get("without_stages"):
        if by_name["patched"]["alone"] != without["alone"]:
            yield f"{dtype} patched: other numbers than without stages"
        if by_name["unpatched"]["tokens"] == without["tokens"]:
            yield f"{dtype} unpatched: the tokens that it has without stages"
    for name, entry in by_name.items():
        if entry["drafts"] and not entry["accepted"]:
            yield f"{dtype} {name}: no draft was accepted"


def engine_problems(where: str, entry: Run, near_tie: float) -> Iterator[str]:
    """Of one engine of the NVIDIA classes."""
    parts = ["model.DeepseekV32DecoderLayer", *["mtp.DeepseekV32MTP"] * bool(entry["drafts"])]
    for part in parts:
        if f"vllm.models.deepseek_v32.nvidia.{part}" not in entry["classes"]:
            yield f"{where}: runs without {part}, but with {entry['classes']}"
    checked, unequal = entry["hand_overs_checked"], entry["hand_overs_unequal"]
    if (checked > 0) != (entry["pipeline"] > 1):
        yield f"{where}: {checked} hand-overs compared"
    gap = max(entry["gaps"])
    if entry["patched"]:
        if unequal:
            yield f"{where}: {unequal} of {checked} hand-overs differ between tensor ranks"
        if gap > near_tie:
            yield f"{where}: a token is {gap:.3g} nats below the best"
        return
    if unequal < checked:
        yield f"{where}: {checked - unequal} of {checked} hand-overs are equal on all tensor ranks"
    if gap < WRONG:
        yield f"{where}: no token is further than {gap:.3g} nats below the best"


@dataclass(frozen=True)
class Cut:
    """An engine of the generic class, and where its stages are cut.

    Attributes:
        cut: layers per stage; "" with one stage.
        refuse: whether `index_share` is there to refuse the cut.
    """

    name: str
    tensor: int = 1
    pipeline: int = 1
    cut: str = ""
    refuse: bool = True
    invariants: Invariants = "off"


@dataclass(frozen=True)
class Outcome:
    """What came of an engine.

    Attributes:
        runs: by name, None where it ended before.
        reads: what `foreign_reads` counted.
        checks, violations: of the invariant for indices.
    """

    runs: dict[str, Any] | None
    log: str
    reads: Counter[str]
    checks: int
    violations: int


CUTS = (
    Cut("one"),
    Cut("legal", 2, 2, LEGAL, invariants="stop"),
    Cut("within", 2, 2, WITHIN, refuse=False),
    Cut("within, refused", 2, 2, WITHIN),
    Cut("within, invariant", 2, 2, WITHIN, refuse=False, invariants="stop"),
)


def serve_cut(python: Path, release: str, case: Cut, directory: Path) -> Outcome:
    """Serve `index_cut_world.py`'s requests with an engine that is cut so."""
    spec = EngineSpec(
        release,
        MODEL_TYPE,
        device="cpu",
        tensor=case.tensor,
        pipeline=case.pipeline,
        invariants=case.invariants,
        sample_every=1,
    )
    spec = replace(spec, patches=names_needed(PATCHES, spec))
    packages = [*([] if case.refuse else ["mtppp_faults"]), "mtppp_patches", "mtppp_cpu"]
    variables = {"MTPPP_ENGINE": spec.to_json()}
    if case.cut:
        variables["VLLM_PP_LAYER_PARTITION"] = case.cut
    if not case.refuse:
        variables["TEST_FAULT"] = "index_cut"
    result, log = directory / "result.json", directory / "log"
    world = WORLDS / "index_cut_world.py"
    engine = environment(packages, directory)
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, world, MODEL, str(case.pipeline), str(case.tensor), result],
            env={**os.environ, **engine, **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(timeout=1600)
        finally:
            # An engine that ends itself leaves workers behind; they are of its session.
            end_session(process.pid)
    reads: Counter[str] = Counter()
    for file in directory.glob("reads-*.json"):
        reads.update(json.loads(file.read_text()))
    checks, violations = read_counts(directory)
    return Outcome(
        json.loads(result.read_text()) if result.exists() else None,
        log.read_text(errors="replace"),
        reads,
        checks[OWN_INDICES],
        violations[OWN_INDICES],
    )


def environment(packages: Sequence[str], directory: Path) -> dict[str, str]:
    """Of an engine with these plugins and no process of its own beside its workers."""
    directory.mkdir(parents=True, exist_ok=True)
    return {**engine_environment(packages, directory), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def end_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def index_runs(python: Path, release: str, directory: Path) -> list[Run]:
    """One entry per case of `CUTS`."""
    return [
        entry_of(case, serve_cut(python, release, case, directory / case.name)) for case in CUTS
    ]


def entry_of(case: Cut, outcome: Outcome) -> Run:
    """The figures of a run."""
    entry: dict[str, Any] = {
        **asdict(case),
        "checks": outcome.checks,
        "violations": outcome.violations,
        "reads": dict(outcome.reads),
    }
    if outcome.runs is None:
        return {**entry, "ended_with": [said for said in (REFUSAL, NOTICE) if said in outcome.log]}
    probabilities = {name: run["short_logprobs"] for name, run in outcome.runs.items()}
    return {
        **entry,
        "tokens": {name: run["tokens"] for name, run in outcome.runs.items()},
        "canary": largest_difference(probabilities["canary"], probabilities["other_canary"]),
    }


REFUSAL = "layer 7 attends with indices that layer 6 computes on another stage"
NOTICE = "The ranks do not compute one model; stopping"


def largest_difference(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def index_problems(runs: Sequence[Run]) -> Iterator[str]:
    """What is not as it must be of stages that are cut somewhere."""
    by_name = {entry["name"]: entry for entry in runs}
    if missing := [case.name for case in CUTS if case.name not in by_name]:
        yield f"not run: {'; '.join(missing)}"
        return
    for name, said in (("within, refused", REFUSAL), ("within, invariant", NOTICE)):
        if said not in by_name[name].get("ended_with", ()):
            yield f"{name}: not stopped"
    one, legal, within = (by_name[name] for name in ("one", "legal", "within"))
    if any("tokens" not in entry for entry in (one, legal, within)):
        yield "an engine has not run to its end"
        return
    if legal["tokens"] != one["tokens"]:
        yield "legal: other tokens than of one process"
    if legal["checks"] < 100 or legal["violations"]:
        yield f"legal: {legal['violations']} of {legal['checks']} choices are of another stage"
    if legal["reads"]:
        yield f"legal: reads what is not the request's: {legal['reads']}"
    if legal["canary"] > 1e-3:
        yield f"legal: others' prompts change a request's numbers by {legal['canary']:.3g}"
    if within["tokens"]["first"] == one["tokens"]["first"]:
        yield "within: the tokens of one process"
    if within["canary"] < 0.01:
        yield f"within: others' prompts change a request's numbers by {within['canary']:.3g} only"
    for what in ("beyond", "others"):
        if not within["reads"].get(what):
            yield f"within: nothing read of what is {what}"


EXPERIMENTS: Mapping[str, Callable[[Path, str, Path], list[Run]]] = {
    **{f"{BOUNDARY}_{dtype}": boundary_runs(dtype) for dtype in DTYPES},
    "index_share": index_runs,
}
"""Name -> what runs it with a python, of a release, in a directory."""


if __name__ == "__main__":
    sys.exit(main())
