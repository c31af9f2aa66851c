#!/usr/bin/env python3
"""Show whether MTP over pipeline stages yields the tokens that one stage yields, on one release.

    scripts/relay_matrix.py 0.29.0 cluster_configs/models/demo-glm4-moe
    scripts/relay_matrix.py 0.33.0 MODEL --on 0.32.0    # without a build for CPUs
    scripts/relay_matrix.py 0.29.0 MODEL --candidates pp2-k3 --scenarios aborts,structured
    scripts/relay_matrix.py 0.29.0 MODEL --candidates pp2-k3 --faults relay_off,grammar_off

Runs the scripted requests of `relay_arm.py` on one stage with MTP (the reference, for each number
of draft tokens) and on two and three stages (the candidates), with the plugins a launch would
ship, then has an engine of one stage without MTP, with as many tensor ranks, score every greedy
token. A candidate is right if

- every rank attests the patches of decoding that it needs, and nothing in their place;
- each greedy token is the scoring engine's best or a near-tie;
- each request that met no near-tie and was not aborted, in a scenario without preemptions, went
  through the same steps as in the reference: as many tokens accepted in each, and the same end;
- what was constrained by a grammar obeys it, and is what the reference yields;
- sampled tokens agree with the scoring engine's probabilities; how many requests drew the
  reference's tokens is in the result;
- the invariants, watched on every step, held, and those that this layout has were checked.

Workers warm up as on GPUs before anything else (`mtppp_cpu/worker.py`).

With --faults each candidate also runs with each of these faults of tests/faults, and must be found
wrong.

The result goes to patches/evidence/RELEASE-MODEL.json unless --output says otherwise; of some
records that are older than the scenario one_left, it is in RELEASE-MODEL-one-left.json. Runs
on two CPU cores and 8 GB of memory for about 25 minutes. Exit status: 0 if all candidates are right
and all faults are found, 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("launcher", "patches", "scripts", "tests/faults")]

from class_evidence import python_of  # noqa: E402
from cpu_engine import engine_environment  # noqa: E402
from mtppp_patches.engine_spec import EngineSpec, Invariants, Speculative  # noqa: E402
from mtppp_patches.fingerprint import fingerprint_file  # noqa: E402
from mtppp_patches.observations import (  # noqa: E402
    DRAFT_IDS,
    HANDED_OVER,
    SAME_STEP,
    read_counts,
)
from mtppp_patches.patch import names_needed  # noqa: E402
from mtppp_patches.registry import PATCHES  # noqa: E402
from mtppp_patches.releases import releases  # noqa: E402

PLUGINS = ("mtppp_patches", "mtppp_cpu")
PROMPTS = ROOT / "cluster_configs/models/demo-prompts.json"

# vLLM's CPU kernels: DeepSeek's latent attention has another block size than plain attention.
BLOCK_SIZE = {"glm4_moe": 32, "deepseek_v3": 16, "glm_moe_dsa": 16}
PLAIN_BLOCK_SIZE = 32
WITHOUT_LATENT_ATTENTION = releases("0.23.0", "0.28.0")
"""On CPUs these have none (0.28.0's imports what only other platforms define), and compute
DeepSeek's as plain attention when told to."""
# Stages of the demo model whose layers share indices; vLLM's own two are 6,6.
PARTITIONS = {("glm_moe_dsa", 3): (6, 4, 2)}
CONTEXT = 320
SLOTS = 4
TOKEN_BUDGET = 64
# On CPUs vLLM computes prompts of latent attention whole and keeps none of them for others.
WHOLE_PROMPTS = ("deepseek_v3",)
WITH_PARTS = ("chunked_prefill", "prefix_hits")
PLENTY = 200
"""Blocks of KV cache that no scenario uses up."""

# Nats. In float32 two layouts differ by rounding alone; bfloat16 has 8 bits of it.
NEAR_TIE = {"float32": 0.01, "bfloat16": 0.5}
SIGMAS = 4.5

SCENARIOS = (
    "long_outputs",
    "ends",
    "more_than_slots",
    "aborts",
    "chunked_prefill",
    "prefix_hits",
    "preemption",
    "structured",
    "sampled",
    "one_left",
)
PREEMPTED = ("long_outputs", "preemption")
"""Scenarios that preempt requests where the KV cache is small."""


@dataclass(frozen=True)
class Arm:
    """One engine.

    Attributes:
        tokens: draft tokens per step; 0 without MTP.
        small_cache: so small a KV cache that requests are preempted; only for `PREEMPTED`.
        fault: what is wrong with it on purpose.
    """

    name: str
    pipeline: int
    tokens: int
    small_cache: bool = False
    tensor: int = 1
    fault: str | None = None


REFERENCES = (
    *(Arm(f"pp1-k{k}", 1, k) for k in (1, 3, 5)),
    Arm("tp2-pp1-k3", 1, 3, tensor=2),
)
CANDIDATES = (
    Arm("pp2-k1", 2, 1),
    Arm("pp2-k3", 2, 3),
    Arm("pp2-k5", 2, 5),
    Arm("pp3-k3", 3, 3),
    Arm("tp2-pp2-k3", 2, 3, tensor=2),
    Arm("pp2-k5-preempted", 2, 5, small_cache=True),
    Arm("pp3-k3-preempted", 3, 3, small_cache=True),
)


def reference_of(arm: Arm) -> Arm:
    """One stage with the same draft tokens and, so that rounding is the same, tensor ranks."""
    return next(r for r in REFERENCES if (r.tokens, r.tensor) == (arm.tokens, arm.tensor))


def watched_in(arm: Arm) -> tuple[str, ...]:
    """The invariants that a sound engine of this layout has."""
    if arm.fault or arm.pipeline == 1:
        return ()
    return (SAME_STEP, DRAFT_IDS, *((HANDED_OVER,) if arm.tensor > 1 else ()))


class ArmFailed(Exception):
    """An engine did not start, died, or did not finish in time; the message ends its log.

    Attributes:
        attested: patch -> ranks that had it in place before.
        invariants: what was counted of them before.
        log: all that it wrote.
    """

    def __init__(self, message: str, directory: Path | None = None) -> None:
        super().__init__(message)
        self.attested = attested(directory / "attest") if directory else {}
        self.invariants = counted(directory) if directory else {}
        self.log = log_of(directory) if directory else ""


def main() -> int:
    """Run the command line."""
    # A default SIGTERM would leave the engines running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("release")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=NEAR_TIE, default="float32")
    parser.add_argument("--candidates", default=",".join(arm.name for arm in CANDIDATES))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--faults", default="", help="faults of tests/faults")
    parser.add_argument(
        "--shared-embedding",
        action="store_true",
        help="run on a copy of the model whose MTP layer has no embedding of its own",
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per engine")
    parser.add_argument("--on", metavar="RELEASE", help="whose compiled parts to use")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.candidates.split(",")
    sound = [arm for arm in CANDIDATES if arm.name in wanted]
    faulty = [
        dataclasses.replace(arm, name=f"{arm.name}-{fault}", fault=fault)
        for fault in filter(None, arguments.faults.split(","))
        for arm in sound
    ]
    python = python_of(arguments.release, arguments.on)
    with tempfile.TemporaryDirectory(prefix="relay-model-") as directory:
        model = arguments.model.resolve()
        if arguments.shared_embedding:
            model = without_own_embedding(model, Path(directory) / model.name, python)
        lab = Laboratory(
            release=arguments.release,
            model=model,
            dtype=arguments.dtype,
            python=python,
            scenarios=arguments.scenarios.split(","),
            timeout=arguments.timeout,
            on=arguments.on,
        )
        result = lab.examine([*sound, *faulty])
    result["shared_embedding"] = arguments.shared_embedding
    name = f"{arguments.release}-{arguments.model.name}.json"
    output = arguments.output or ROOT / "patches/evidence" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, arm in result["arms"].items():
        say(f"{name}: {'right' if arm['right'] else 'wrong'}")
    say(f"{'as it must be' if result['right'] else 'NOT AS IT MUST BE'}: {output}")
    return 0 if result["right"] else 1


def without_own_embedding(model: Path, copy: Path, python: Path) -> Path:
    """A copy of a model whose MTP layer has no embedding of its own; the path of the copy."""
    shutil.copytree(model, copy)
    code = (
        "import re, sys; from safetensors.torch import load_file, save_file\n"
        "tensors = load_file(sys.argv[1])\n"
        "own = [n for n in tensors if re.fullmatch(r'model.layers.*.embed_tokens.weight', n)]\n"
        "assert own\n"
        "kept = {n: t for n, t in tensors.items() if n not in own}\n"
        "save_file(kept, sys.argv[1], metadata={'format': 'pt'})\n"
    )
    subprocess.run([python, "-c", code, copy / "model.safetensors"], check=True)
    return copy


@dataclass(frozen=True)
class Laboratory:
    """What all engines of one run have in common.

    Attributes:
        on: the release whose compiled parts are used, where this one has no build for CPUs.
        faults_watched: what engines that are wrong on purpose do about their invariants: "off",
            "count" or "stop". Where it is the tokens that must tell, they are not watched.
    """

    release: str
    model: Path
    dtype: str
    python: Path
    scenarios: Sequence[str]
    timeout: float
    on: str | None = field(default=None, kw_only=True)
    faults_watched: Invariants = field(default="off", kw_only=True)

    @property
    def model_type(self) -> str:
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return str(config["model_type"])

    @property
    def variables(self) -> dict[str, str]:
        """What an engine of this model needs here beyond a launch's environment."""
        told = self.model_type in WHOLE_PROMPTS and self.release in WITHOUT_LATENT_ATTENTION
        return {"VLLM_MLA_DISABLE": "1"} if told else {}

    @property
    def whole_prompts(self) -> bool:
        return self.model_type in WHOLE_PROMPTS and not self.variables

    @property
    def left_out(self) -> dict[str, str]:
        """Scenarios that this model cannot run here -> why."""
        if not self.whole_prompts:
            return {}
        why = "vLLM has neither chunked prefill nor prefix caching for latent attention on CPUs"
        return {name: why for name in WITH_PARTS if name in self.scenarios}

    def examine(self, candidates: Sequence[Arm]) -> dict[str, Any]:
        """Run everything and judge it; the content of the result file."""
        result: dict[str, Any] = {
            "release": self.release,
            "compiled_parts": self.on or self.release,
            "model": self.model.name,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "patches": self._patches(),
            "near_tie_nats": NEAR_TIE[self.dtype],
            "scenarios": list(self.scenarios),
            "left_out": self.left_out,
            "variables": self.variables,
            "arms": {},
        }
        references = {arm: reference_of(arm) for arm in candidates}
        runs: dict[str, dict[str, Any]] = {}
        for arm in [*dict.fromkeys(references.values()), *candidates]:
            try:
                runs[arm.name] = self.generate(arm)
            except ArmFailed as failure:
                result["arms"][arm.name] = dataclasses.asdict(arm) | {
                    "right": False,
                    "failed": str(failure),
                }
                say(f"{arm.name}: {failure}")
        judged = {arm: runs.get(reference.name) for arm, reference in references.items()}
        judged |= dict.fromkeys(references.values())
        for tensor in sorted({arm.tensor for arm in judged}):
            scored = [arm for arm in judged if arm.tensor == tensor and arm.name in runs]
            gaps = self.score([runs[arm.name] for arm in scored], tensor=tensor)
            for arm in scored:
                verdict = judge(runs[arm.name], judged[arm], gaps, NEAR_TIE[self.dtype])
                result["arms"][arm.name] = dataclasses.asdict(arm) | verdict
        result["right"] = all(
            arm["right"] == (arm["fault"] is None) for arm in result["arms"].values()
        )
        return result

    def generate(self, arm: Arm) -> dict[str, Any]:
        """Run all scenarios on one engine."""
        left_out = self.left_out
        scenarios = [
            name
            for name in self.scenarios
            if name not in left_out and (name in PREEMPTED or not arm.small_cache)
        ]
        job = {"prompts": str(PROMPTS), "scenarios": scenarios}
        result: dict[str, Any] = self._run(arm, job)
        everywhere = list(range(arm.pipeline * arm.tensor))
        for patch in PATCHES:
            if patch.scope == "decode" and patch.name in self._spec(arm).patches and not arm.fault:
                ranks = result["attested"].get(patch.name)
                if ranks != everywhere:
                    raise ArmFailed(f"patch {patch.name} is attested by ranks {ranks} only")
        watched = "invariants" in self._spec(arm).patches
        for invariant in watched_in(arm) if watched else ():
            if not result["invariants"]["checks"][invariant]:
                raise ArmFailed(f"invariant {invariant} was never checked")
        return result

    def score(
        self, runs: Iterable[Mapping[str, Any]], *, tensor: int = 1
    ) -> dict[str, list[dict[str, float]]]:
        """What one stage without MTP says of each token of each unconstrained answer.

        With as many tensor ranks as the runs had: in bfloat16 rounding differs by more than a
        near-tie between one rank and two.
        """
        sequences = {}
        for run in runs:
            for answers in run["scenarios"].values():
                for answer in answers:
                    if answer["regex"] is None and answer["steps"]:
                        sequences[key_of(answer)] = {
                            "prompt": answer["prompt"],
                            "tokens": tokens_of(answer),
                        }
        say(f"scoring {sum(len(s['tokens']) for s in sequences.values())} tokens")
        if not sequences:
            return {}
        scored = self._run(
            Arm(f"score-tp{tensor}", 1, 0, tensor=tensor), {"score": list(sequences.values())}
        )
        return dict(zip(sequences, scored, strict=True))

    def _run(self, arm: Arm, job: dict[str, Any]) -> Any:
        say(f"{self.release} {self.model.name} {arm.name}")
        with tempfile.TemporaryDirectory(prefix="relay-") as name:
            directory = Path(name)
            result = directory / "result.json"
            job = job | {"engine": self._engine(arm), "result": str(result)}
            with (directory / "log").open("w") as output:
                process = subprocess.Popen(
                    [self.python, ROOT / "scripts/relay_arm.py"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    text=True,
                    env=self._environment(arm, directory),
                    start_new_session=True,
                )
                try:
                    process.communicate(json.dumps(job), timeout=self.timeout)
                except subprocess.TimeoutExpired:
                    raise ArmFailed(f"not done after {self.timeout:.0f} s", directory) from None
                finally:
                    end_session(process)
            if process.returncode or not result.exists():
                raise ArmFailed(errors_in(log_of(directory)), directory)
            outcome = json.loads(result.read_text())
            if isinstance(outcome, dict):
                outcome["attested"] = attested(directory / "attest")
                outcome["invariants"] = counted(directory)
            return outcome

    def _engine(self, arm: Arm) -> dict[str, Any]:
        block_size = PLAIN_BLOCK_SIZE if self.variables else BLOCK_SIZE[self.model_type]
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "async_scheduling": True,
            "pipeline_parallel_size": arm.pipeline,
            "tensor_parallel_size": arm.tensor,
            "max_model_len": CONTEXT,
            "max_num_seqs": SLOTS,
            "max_num_batched_tokens": (CONTEXT if self.whole_prompts else TOKEN_BUDGET),
            "block_size": block_size,
            "num_gpu_blocks_override": CONTEXT // block_size + 3 if arm.small_cache else PLENTY,
        }
        if arm.tokens:
            speculative = {"method": "mtp", "num_speculative_tokens": arm.tokens}
            arguments["speculative_config"] = speculative
        return arguments

    def _spec(self, arm: Arm) -> EngineSpec:
        spec = EngineSpec(
            self.release,
            self.model_type,
            device="cpu",
            pipeline=arm.pipeline,
            tensor=arm.tensor,
            layer_partition=PARTITIONS.get((self.model_type, arm.pipeline)),
            speculative=Speculative("mtp", arm.tokens) if arm.tokens else None,
            invariants=self.faults_watched if arm.fault else "count",
            sample_every=1,
        )
        return dataclasses.replace(spec, patches=names_needed(PATCHES, spec))

    def _patches(self) -> dict[str, str]:
        """Patches that change what is decoded here -> fingerprint of their source."""
        spec = self._spec(CANDIDATES[0])
        return {
            patch.name: fingerprint_file(ROOT / f"patches/mtppp_patches/{patch.name}.py")
            for patch in PATCHES
            if patch.name in spec.patches and patch.scope != "deployment"
        }

    def _environment(self, arm: Arm, directory: Path) -> dict[str, str]:
        packages = list(PLUGINS)
        variables = self.variables
        if arm.fault:
            packages.insert(0, "mtppp_faults")
            variables["TEST_FAULT"] = arm.fault
        spec = self._spec(arm)
        if spec.layer_partition:
            variables["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, spec.layer_partition))
        return {
            **os.environ,
            **engine_environment(packages, directory),
            **variables,
            "MTPPP_ENGINE": spec.to_json(),
            # The engine core in the script's own process: it then steps when it is told to.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }


def judge(
    run: Mapping[str, Any],
    reference: Mapping[str, Any] | None,
    gaps: Mapping[str, Sequence[Mapping[str, float]]],
    near_tie: float,
) -> dict[str, Any]:
    """What is right and wrong with one arm's answers; without a reference, by score alone."""
    scenarios = {}
    right = []
    for name, answers in run["scenarios"].items():
        expected = reference["scenarios"][name] if reference else [None] * len(answers)
        pairs = list(zip(answers, expected, strict=True))
        verdicts = (
            judge_greedy(pairs, gaps, near_tie, preempted=run["preemptions"][name] > 0),
            judge_structured(pairs),
            judge_sampled([pair for pair in pairs if pair[0]["sampled"]], gaps),
        )
        scenarios[name] = {
            "requests": len(answers),
            "tokens": sum(len(tokens_of(answer)) for answer in answers),
            "preemptions": run["preemptions"][name],
        }
        for verdict in verdicts:
            right.append(verdict.pop("right", True))
            scenarios[name] |= verdict
    violations: Mapping[str, int] = run["invariants"]["violations"]
    return {
        "right": all(right) and not any(violations.values()),
        "drafts": run["drafts"],
        "accepted": run["accepted"],
        "prefix_hits": run["prefix_hits"],
        "padded_first_steps": run["padded_first_steps"],
        "attested": run["attested"],
        "invariants": run["invariants"],
        "scenarios": scenarios,
    }


Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]]


def judge_greedy(
    pairs: Pairs,
    gaps: Mapping[str, Sequence[Mapping[str, float]]],
    near_tie: float,
    *,
    preempted: bool,
) -> dict[str, Any]:
    """Teacher-forced gaps, and the steps compared with the reference's."""
    greedy = [pair for pair in pairs if not pair[0]["sampled"] and pair[0]["regex"] is None]
    of_tokens = [entry["gap"] for answer, _ in greedy for entry in gaps.get(key_of(answer), [])]
    wrong = sum(gap > near_tie for gap in of_tokens)
    empty = sum(not answer["steps"] for answer, _ in greedy)
    judged: dict[str, Any] = {
        "not_best": sum(gap > 0 for gap in of_tokens),
        "wrong": wrong,
        "largest_gap": round(max(of_tokens, default=0.0), 4),
    }
    same = different = 0
    for answer, expected in greedy:
        if expected is None or preempted or "abort" in (answer["finish"], expected["finish"]):
            continue
        if meets_near_tie(answer, expected, gaps, near_tie):
            continue
        if answer["steps"] == expected["steps"] and answer["finish"] == expected["finish"]:
            same += 1
        else:
            different += 1
    judged |= {"same_steps": same, "other_steps": different}
    judged["right"] = wrong == 0 and empty == 0 and different == 0
    return judged


def judge_structured(pairs: Pairs) -> dict[str, Any]:
    """Whether what a grammar constrains obeys it, and is what the reference yields."""
    constrained = [pair for pair in pairs if pair[0]["regex"] is not None]
    if not constrained:
        return {}
    invalid = sum(
        answer["finish"] != "stop" or not re.fullmatch(answer["regex"], answer["text"])
        for answer, _ in constrained
    )
    other = sum(
        expected is not None and tokens_of(answer) != tokens_of(expected)
        for answer, expected in constrained
    )
    return {
        "constrained": len(constrained),
        "invalid": invalid,
        "other_than_reference": other,
        "right": invalid == 0 and other == 0,
    }


def judge_sampled(
    pairs: Pairs, gaps: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Any]:
    """How often the best token was drawn, against how often it should have been.

    The sum of `drawn - probability` over all tokens is a martingale: its variance is the sum of
    p(1 - p), whatever the dependence between tokens.
    """
    if not pairs:
        return {}
    entries = [entry for answer, _ in pairs for entry in gaps[key_of(answer)]]
    excess = sum((entry["gap"] == 0) - entry["best"] for entry in entries)
    variance = sum(entry["best"] * (1 - entry["best"]) for entry in entries)
    sigmas = excess / math.sqrt(variance)
    # Seeds are the same, but the layouts round differently, and a draw may be as near as a tie.
    same = sum(
        expected is not None and answer["steps"] == expected["steps"] for answer, expected in pairs
    )
    return {
        "sigmas": round(sigmas, 2),
        "same_draws": same,
        "right": abs(sigmas) < SIGMAS,
    }


def meets_near_tie(
    answer: Mapping[str, Any],
    expected: Mapping[str, Any],
    gaps: Mapping[str, Sequence[Mapping[str, float]]],
    near_tie: float,
) -> bool:
    """Whether the two differ for the first time at a token that is as good as the best."""
    ours, theirs = tokens_of(answer), tokens_of(expected)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            pair = gaps[key_of(answer)][index], gaps[key_of(expected)][index]
            return max(entry["gap"] for entry in pair) <= near_tie
    return False


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return [token for step in answer["steps"] for token in step]


def key_of(answer: Mapping[str, Any]) -> str:
    return json.dumps([answer["prompt"], tokens_of(answer)])


def attested(directory: Path) -> dict[str, list[int]]:
    """Patch -> ranks on which all of its targets are in place."""
    ranks: dict[str, list[int]] = {}
    for file in sorted(directory.glob("rank-*.json")):
        record = json.loads(file.read_text())
        for name, state in record["patches"].items():
            ranks.setdefault(name, [])
            if not state["pending"] and not record["displaced"]:
                ranks[name].append(record["rank"])
    return ranks


def counted(directory: Path) -> dict[str, Mapping[str, int]]:
    """How often each invariant was checked, and how often it did not hold."""
    checks, violations = read_counts(directory)
    return {"checks": checks, "violations": violations}


def log_of(directory: Path) -> str:
    return (directory / "log").read_text(errors="replace")


def end_session(process: subprocess.Popen[str]) -> None:
    """A vLLM that crashed leaves workers behind; they are of the process's session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def errors_in(log: str) -> str:
    """The last few lines that name an error, or the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)]
    return "\n".join((errors or lines)[-4:])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
