#!/usr/bin/env python3
"""What watching its invariants costs a pipeline, in tokens per second.

    scripts/bench_invariants.py > record.json      twelve rounds, about six minutes
    scripts/bench_invariants.py --rounds 6

One engine on CPUs, two stages with MTP, answers the same requests in four ways in each round: not
watched, watched as often as a launch has it if nothing else is said, watched on every step, and not
watched once more; which way is first goes around. It is the same engine in all four: not watched,
it runs the functions that vLLM ships. Each way is compared with the first not watched one of its
round; that of the second one is what chance does.

On CPUs all ranks share the cores with what they do for a check, and a step of the demo model is a
few milliseconds: a GPU that serves a large model hides more. So the script also counts what a
checked step has a rank's GPU do at the sizes of a file of cluster_configs, by running the very code
on tensors without data, beside what that GPU reads in a step anyway.

Prints a JSON record. Exit status 1 when the ratio of tokens per second at the default is not shown
to be 0.97 at least: the median of all rounds is not above that with confidence 95 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("launcher", "patches", "scripts")]

from class_evidence import python_of  # noqa: E402
from cpu_engine import engine_environment  # noqa: E402
from mtppp.cluster import load  # noqa: E402
from mtppp.cluster.schema import Invariants  # noqa: E402
from mtppp.hosts.facts import GpuFacts  # noqa: E402
from mtppp.model.config import find_config  # noqa: E402
from mtppp.model.facts import read_facts  # noqa: E402
from mtppp.plan.build import serving  # noqa: E402
from mtppp.plan.costs import Workload, best_cut  # noqa: E402
from mtppp.plan.memory import Gpu  # noqa: E402
from mtppp.verify.statistics import binomial_at_most  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Speculative  # noqa: E402
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from relay_matrix import end_session, errors_in  # noqa: E402

RELEASE = "0.32.0"
MODEL = ROOT / "cluster_configs/models/demo-glm4-moe"
PROMPTS = ROOT / "cluster_configs/models/demo-prompts.json"
LARGE = ROOT / "cluster_configs/glm-5.2-fp8-2x8-h100.yaml"
STAGES, DRAFTS, SLOTS = 2, 3, 8
TOKENS = 64  # of each answer
START = 300.0  # seconds, at most, until the engine answers
SECONDS = 120.0  # for a batch, at most

DEFAULT = Invariants().sample_every
WAYS: Mapping[str, int] = {"off": 0, "default": DEFAULT, "every_step": 1, "off_again": 0}
"""Way -> steps from one that is looked at to the next; 0: not watched."""
LEAST_RATIO = 0.97
CONFIDENCE = 0.95


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=SLOTS, help="in a batch")
    arguments = parser.parse_args()
    rounds = [turned(list(WAYS), number) for number in range(arguments.rounds)]
    load_before = [round(load, 1) for load in os.getloadavg()]
    large = Large()
    result = run(
        {
            "engine": engine(),
            "prompts": str(PROMPTS),
            "requests": arguments.requests,
            "tokens": TOKENS,
            # The first is not measured: kernels are made then, and what watches begins.
            "batches": [DEFAULT, *(WAYS[way] for ways in rounds for way in ways)],
            "counted": large.sizes,
            "steps": list(large.steps.values()),
        }
    )
    batches = iter(result["batches"][1:])
    by_way = [{way: next(batches) for way in ways} for ways in rounds]
    seen = {way: sum(one[way]["compared"] for one in by_way) for way in WAYS}
    if result["violations"] or any(bool(seen[way]) != bool(WAYS[way]) for way in WAYS):
        sys.exit(f"{result['violations']} violations, steps compared {seen}: no comparison")
    speeds = [{way: one[way]["tokens"] / one[way]["seconds"] for way in WAYS} for one in by_way]
    ratios = {
        way: compared([one[way] / one["off"] for one in speeds]) for way in WAYS if way != "off"
    }
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": " ".join(["scripts/bench_invariants.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load_before": load_before,
        "engine": f"vLLM {RELEASE}, {MODEL.name}, {STAGES} stages, {DRAFTS} drafts, {SLOTS} slots",
        "batch": {"requests": arguments.requests, "tokens": arguments.requests * TOKENS},
        "sample_every": dict(WAYS),
        "tokens_per_second": [{way: round(one[way], 1) for way in WAYS} for one in speeds],
        "steps_compared": seen,
        "ratio_to_off": ratios,
        "checked_step": {
            "of": LARGE.name,
            **large.sizes,
            "bytes_that_a_gpu_reads_in_a_decode_step": large.read_in_a_step,
            **{
                what: {"tokens": tokens, **result["counted"][str(tokens)]}
                for what, tokens in large.steps.items()
            },
        },
    }
    print(json.dumps(record, indent=1))
    interval = ratios["default"]["median_interval"]
    return 0 if interval and interval[0] >= LEAST_RATIO else 1


def turned(ways: list[str], by: int) -> list[str]:
    """The ways, another one first."""
    first = by % len(ways)
    return [*ways[first:], *ways[:first]]


def compared(ratios: Sequence[float]) -> dict[str, Any]:
    """Median and spread of the ratios of all rounds."""
    return {
        "median": round(statistics.median(ratios), 4),
        "median_interval": [round(one, 4) for one in median_interval(ratios)],
        "range": [round(min(ratios), 4), round(max(ratios), 4)],
    }


def median_interval(values: Sequence[float]) -> Sequence[float]:
    """Where the median is with CONFIDENCE, however values are distributed; () with too few."""
    ordered, count = sorted(values), len(values)
    outside = (1 - CONFIDENCE) / 2
    left_out = sum(binomial_at_most(k, count, 0.5) <= outside for k in range(count))
    return (ordered[left_out - 1], ordered[-left_out]) if left_out else ()


class Large:
    """The deployment at whose sizes a checked step is counted.

    Attributes:
        sizes: numbers of a token in each tensor that is handed over, and their type.
        steps: tokens of a step in which all slots decode, and of the largest one.
        read_in_a_step: bytes that a GPU of the first stage reads when all slots decode.
    """

    def __init__(self) -> None:
        cluster = load(LARGE).cluster
        config = find_config(cluster.model.id).values
        facts, served = read_facts(config), serving(cluster)
        self.sizes = {"hidden": config["hidden_size"], "dtype": config["dtype"]}
        self.steps = {
            "decode": served.max_num_seqs * (1 + served.drafts),
            "largest": served.max_num_batched_tokens,
        }
        gpu = Gpu(GpuFacts.of_type(str(cluster.nodes[0].gpu_type)).memory)
        cut = best_cut(
            facts,
            served,
            [gpu] * cluster.parallel.pipeline,
            workload=Workload(requests=served.max_num_seqs),
        )
        self.read_in_a_step = cut.stages[0].time


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine makes of a job of `invariants_arm.py`."""
    timeout = START + SECONDS * len(job["batches"])
    with tempfile.TemporaryDirectory(prefix="bench-invariants-") as name:
        directory = Path(name)
        result, log = directory / "result.json", directory / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [python_of(RELEASE, None), ROOT / "scripts/invariants_arm.py"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env=environment(directory),
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps({**job, "result": str(result)}), timeout=timeout)
            except subprocess.TimeoutExpired:
                sys.exit(f"the engine was not done after {timeout:.0f} s")
            finally:
                end_session(process)
        if process.returncode or not result.exists():
            sys.exit(f"the engine failed: {errors_in(log.read_text(errors='replace'))}")
        outcome: dict[str, Any] = json.loads(result.read_text())
        return outcome


def engine() -> dict[str, Any]:
    """Arguments of vllm.LLM; no prompt is found in the cache, since all ways have the same."""
    return {
        "model": str(MODEL),
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "async_scheduling": True,
        "pipeline_parallel_size": STAGES,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
        "max_model_len": 512,
        "max_num_seqs": SLOTS,
        "block_size": 32,
        "enable_prefix_caching": False,
    }


def environment(directory: Path) -> dict[str, str]:
    """Variables of an engine with the plugins of a launch, which watches as one does."""
    spec = EngineSpec(
        RELEASE,
        json.loads((MODEL / "config.json").read_text())["model_type"],
        device="cpu",
        pipeline=STAGES,
        speculative=Speculative("mtp", DRAFTS),
        invariants="count",
        sample_every=DEFAULT,
    )
    spec = dataclasses.replace(spec, patches=names_needed(PATCHES, spec))
    return {
        **os.environ,
        **engine_environment(["mtppp_patches", "mtppp_cpu"], directory),
        "MTPPP_ENGINE": spec.to_json(),
        # The engine core in the script's own process: what it watches with can be switched there.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


if __name__ == "__main__":
    sys.exit(main())
