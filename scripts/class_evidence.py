#!/usr/bin/env python3
"""Run what can be shown on vLLM's own model classes, without a GPU, and put it on record.

    scripts/class_evidence.py 0.32.0
    scripts/class_evidence.py 0.33.0 --on 0.32.0     # a release without a build for CPUs

Runs, with an environment's python (`scripts/environment`, or `scripts/overlay_environment` with
--on), the experiments of tests/patches that need no engine:

- stage_boundary    models over process groups, TP2 x PP2 and TP4 x PP2, float32 and bfloat16, as
                    shipped and patched, against one process and against tensor parallelism alone
- index_share       the release's rules for layers that share sparse-attention indices; what its
                    EngineCore and workers say to cuts of GLM-5.2; indices of another stage noticed
- drafter_weights   what the drafter classes make of a checkpoint without an embedding of their own

Writes patches/evidence/RELEASE-classes.json: what each shows, for which families, and every run's
figures. `tests/patches/test_support.py` holds support.json to it. A minute on two CPU cores. Exit
status: 0 if all is as it must be, 1 otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "patches")]

from mtppp_patches.fingerprint import fingerprint_file  # noqa: E402
from mtppp_patches.observations import HANDED_OVER, OWN_INDICES  # noqa: E402
from mtppp_patches.releases import RELEASES, releases  # noqa: E402

WORLDS = ROOT / "tests/patches"
PATCHES = ("stage_boundary", "index_share", "drafter_weights")

Run = Mapping[str, Any]

FAMILIES = {
    "nvidia": ("deepseek_v32", "glm_moe_dsa"),
    "amd": ("deepseek_v32", "glm_moe_dsa"),
    "dots3_note": ("dots3_note",),
}
"""Implementation in `pipeline_world.py` -> model types that vLLM builds with it."""

# The first release with this implementation of these families as vLLM's choice for them.
_FIRST = {"nvidia": "0.29.0", "amd": "0.31.0", "dots3_note": "0.28.0"}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("--on", metavar="RELEASE", help="whose compiled parts to use")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    release, base = arguments.release, arguments.on
    record = examine(release, python_of(release, base), base)
    output = arguments.output or ROOT / f"patches/evidence/{release}-classes.json"
    output.write_text(text_of(record), encoding="utf-8")
    for patch, problems in record["problems"].items():
        shown = ", ".join(record["shows"].get(patch, ())) or "nothing"
        print(f"{patch}: shown for {shown}", *problems, sep="\n  ", file=sys.stderr)
    print(output, file=sys.stderr)
    return 1 if any(record["problems"].values()) else 0


def python_of(release: str, base: str | None) -> Path:
    """The python of an environment with `release`, made if need be."""
    script = [ROOT / "scripts/environment", release]
    if base is not None:
        script = [ROOT / "scripts/overlay_environment", release, base]
    made = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


def examine(release: str, python: Path, base: str | None = None) -> dict[str, Any]:
    """Run everything on one release; the content of the result file."""
    runs = {
        "stage_boundary": run(python, "pipeline_world.py", *families_of(release)),
        "index_share": run(python, "index_world.py"),
        "drafter_weights": run(python, "drafter_world.py"),
    }
    command = f"scripts/class_evidence.py {release}"
    return {
        "level": "class",
        "release": release,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command if base is None else f"{command} --on {base}",
        "compiled_parts": base or release,
        "patches": {
            name: fingerprint_file(ROOT / f"patches/mtppp_patches/{name}.py") for name in PATCHES
        },
        **verdict(runs),
        "runs": runs,
    }


def families_of(release: str) -> list[str]:
    """The implementations that vLLM takes in `release` and that leave sums to the next layer; all
    of them in a release that is not known yet."""
    return [
        family
        for family, first in _FIRST.items()
        if release not in RELEASES or release in releases(first, RELEASES[-1])
    ]


def run(python: Path, world: str, *arguments: str) -> list[Run]:
    """The runs that a world prints; none if it was given nothing to run.

    Raises:
        subprocess.CalledProcessError: it failed; its messages are on stderr.
    """
    if world == "pipeline_world.py" and not arguments:
        return []
    done = subprocess.run(
        [python, WORLDS / world, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def verdict(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """`shows`: patch -> model types it is shown for; `problems`: patch -> what speaks against it.

    Pure, so that a record can be judged again.
    """
    problems = {
        "stage_boundary": [*boundary_problems(runs["stage_boundary"])],
        "index_share": [
            *index_problems(runs["index_share"]),
            *notice_problems(runs["stage_boundary"]),
        ],
        "drafter_weights": [*drafter_problems(runs["drafter_weights"])],
    }
    shown = {
        "stage_boundary": {
            model_type
            for entry in runs["stage_boundary"]
            for model_type in FAMILIES[entry["family"]]
        },
        # The rule of these two is one and the same.
        "index_share": {
            model_type
            for entry in runs["index_share"]
            if entry["experiment"] == "refusals"
            for model_type in ("deepseek_v32", entry["family"])
        },
        "drafter_weights": {
            model_type
            for entry in runs["drafter_weights"]
            for model_type in drafted_by(entry["class"], runs["drafter_weights"])
        },
    }
    return {
        "shows": {name: sorted(types) for name, types in shown.items() if not problems[name]},
        "problems": problems,
    }


def boundary_problems(runs: Sequence[Run]) -> Iterator[str]:
    """What is not as it must be when stages compute what one process computes."""
    for entry in runs:
        where = f"{entry['family']} {entry['dtype']} TP{entry['tensor']} x PP{entry['pipeline']}"
        if entry["expert_parallel"]:
            where += " EP"
        error = entry["relative_error"]
        if not entry["patched"]:
            if error < 1e-2 or entry["handed_over_equal"]:
                yield f"{where}: right without the patch ({error:.1e})"
            if HANDED_OVER not in entry["violated"]:
                yield f"{where}: the invariant does not notice"
            continue
        if error > (1e-5 if entry["dtype"] == "float32" else 5e-2):
            yield f"{where}: relative error {error:.1e} with the patch"
        if not entry["equal_to_tensor_only"]:
            yield f"{where}: not bit by bit what tensor parallelism alone computes"
        if not entry["handed_over_equal"] or HANDED_OVER in entry["violated"]:
            yield f"{where}: ranks hand over different tensors"
        if entry["summed"] != sums_of_stages(entry):
            yield f"{where}: {entry['summed']} sums, {sums_of_stages(entry)} expected"


def sums_of_stages(entry: Run) -> list[int]:
    """All-reduces per forward pass on the ranks of the first stage and of the others.

    Two per layer, as with tensor parallelism alone, and one more in each stage that was handed
    something: its first layer's, over the sum and zeros. None inside a stage.
    """
    per_stage: int = entry["summed_tensor_only"] // entry["pipeline"]
    return [per_stage, per_stage + 1]


def notice_problems(runs: Sequence[Run]) -> Iterator[str]:
    """Layers that use another stage's indices are noticed while they run, and no others."""
    for entry in runs:
        layers, stages = len(entry["indexers"]), entry["pipeline"]
        cut = any(entry["indexers"][start] == "S" for start in range(0, layers, layers // stages))
        if entry["patched"] and (OWN_INDICES in entry["violated"]) != cut:
            noticed = "not noticed" if cut else "reported where there are none"
            yield f"{entry['family']} {entry['indexers']} PP{stages}: foreign indices {noticed}"


def index_problems(runs: Sequence[Run]) -> Iterator[str]:
    """Where the release shares indices otherwise than we think, or an illegal cut would start."""
    for entry in runs:
        if entry["experiment"] == "rules":
            if entry["differ"] or not entry["sharing_layers"]:
                yield f"{entry['source']}: other layers share, as in {entry['differ'][:1]}"
            continue
        legal = entry["partition"] in ("42,36", "38,40")
        refused = "attends with indices" in entry["engine"]
        first, second = entry["workers"]
        if refused == legal or first != "starts" or second != entry["engine"]:
            yield f"partition {entry['partition']}: {entry['engine']}; workers {entry['workers']}"


def drafter_problems(runs: Sequence[Run]) -> Iterator[str]:
    """Drafters that have no embedding after loading, as they will run."""
    patched = {entry["class"] for entry in runs if entry["patched"]}
    for entry in runs:
        drafter = entry["class"].partition(":")[2]
        if not entry["other_weights"]:
            yield f"{drafter}: its own weights are not loaded"
        if entry["class"] in patched and not entry["patched"]:
            if entry["embedding"]:
                yield f"{drafter}: has its embedding without the patch"
            continue
        if not entry["embedding"]:
            yield f"{drafter}: has no embedding"
        if entry["patched"] and "no model.embed_tokens.weight" not in entry["checkpoint_without"]:
            yield f"{drafter}: a checkpoint without an embedding passes"


def drafted_by(drafter: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """The model types whose drafts a class makes, in a release with these classes."""
    if drafter.endswith(":DeepseekV32MTP"):
        return ("deepseek_v32", "glm_moe_dsa")
    alone = all(entry["class"] == drafter for entry in runs)
    return ("deepseek_v3", "deepseek_v32", "glm_moe_dsa") if alone else ("deepseek_v3",)


def text_of(record: Mapping[str, Any]) -> str:
    """The record as JSON, each run on a line of its own."""
    head = json.dumps({**record, "runs": {}}, indent=1)
    parts = [
        f'  "{name}": [\n' + ",\n".join(f"   {json.dumps(entry)}" for entry in entries) + "\n  ]"
        for name, entries in record["runs"].items()
        if entries
    ]
    return head.replace('"runs": {}', '"runs": {\n' + ",\n".join(parts) + "\n }") + "\n"


if __name__ == "__main__":
    sys.exit(main())
