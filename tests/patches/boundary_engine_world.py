"""vLLM's NVIDIA class of GLM-5.2 in engines on CPU, with and without stages.

    PYTHON_OF_A_RELEASE boundary_engine_world.py MODEL DIRECTORY DTYPE [CASE...]

in the environment of an engine that has the plugins `mtppp_faults` and `mtppp_gpu_classes` beside
ours. In DIRECTORY each engine has its own. The tokens of all are scored by the generic class of one
process in float32. Prints one JSON object per engine: `gaps` has, for each request, by how much
that class prefers another token at most; `alone` the log probabilities of a request by itself.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine_cases import in_a_process
from vllm import LLM, SamplingParams
from vllm.version import __version__

from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.observations import HANDED_OVER, read_counts
from mtppp_patches.patch import names_needed
from mtppp_patches.registry import PATCHES

PROMPTS = Path(__file__).resolve().parents[2] / "cluster_configs/models/demo-prompts.json"
# More positions than an indexer chooses, about as many, and few.
LENGTHS = (110, 90, 70, 20)
NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        patched: whether it has `stage_boundary`, where that is needed.
        drafts: of MTP, per step.
    """

    name: str
    tensor: int = 2
    pipeline: int = 2
    patched: bool = True
    drafts: int = 0


CASES = (
    Case("without_stages", pipeline=1),
    Case("unpatched", patched=False),
    Case("patched"),
    Case("patched_mtp", drafts=3),
)


def main() -> None:
    model, root, dtype, *names = sys.argv[1:]
    served = {}
    for case in CASES:
        if names and case.name not in names:
            continue
        directory = Path(root) / case.name
        serving = functools.partial(serve, model, dtype, case)
        served[case] = in_a_process(serving, environment_of(case, directory), directory)
    sequences = [
        answer for runs in served.values() if runs for answer in (*runs["together"], runs["alone"])
    ]
    directory = Path(root) / "reference"
    generic = {"VLLM_PLUGINS": "mtppp_cpu"}
    scored = in_a_process(functools.partial(score, model, sequences), generic, directory)
    for case, runs in served.items():
        record: dict[str, Any] = {"dtype": dtype, **asdict(case), "ended": runs is None}
        if runs:
            gaps = scored[: len(LENGTHS) + 1]
            del scored[: len(LENGTHS) + 1]
            checks, violations = read_counts(Path(root) / case.name)
            record |= {
                "classes": runs["classes"],
                "accepted": runs["accepted"],
                "gaps": [max(found) for found in gaps],
                "tokens": [answer["tokens"] for answer in (*runs["together"], runs["alone"])],
                "alone": runs["alone"]["logprobs"],
                "hand_overs_checked": checks[HANDED_OVER],
                "hand_overs_unequal": violations[HANDED_OVER],
            }
        print(json.dumps(record), flush=True)


def environment_of(case: Case, directory: Path) -> dict[str, str]:
    """As for a deployment on GPUs of that layout, so that what is needed there is installed."""
    release = __version__.partition("+")[0]
    spec = EngineSpec(
        release,
        "glm_moe_dsa",
        tensor=case.tensor,
        pipeline=case.pipeline,
        invariants="count",
        sample_every=1,
        speculative=Speculative("mtp", case.drafts) if case.drafts else None,
    )
    spec = replace(spec, patches=names_needed(PATCHES, spec))
    plugins = ["mtppp_cpu", "mtppp_gpu_classes", "mtppp_patches"]
    return {
        "MTPPP_ENGINE": spec.to_json(),
        "MTPPP_RUN_DIR": str(directory),
        "TEST_FAULT": "boundary_off",
        "VLLM_PLUGINS": ",".join(plugins if case.patched else ["mtppp_faults", *plugins]),
    }


def serve(model: str, dtype: str, case: Case) -> dict[str, Any]:
    """Requests together, and then one of them alone: its numbers come about the same way in each
    layout, down to the last bit."""
    drafting = {"method": "mtp", "num_speculative_tokens": case.drafts} if case.drafts else None
    engine = engine_of(
        model,
        dtype=dtype,
        tensor_parallel_size=case.tensor,
        pipeline_parallel_size=case.pipeline,
        speculative_config=drafting,
        async_scheduling=True,
    )
    prompts = prompts_of(engine)
    together = generate(engine, prompts)
    [alone] = generate(engine, prompts[:1])
    accepted = sum(
        metric.value
        for metric in engine.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    )
    return {
        "classes": sorted({name for found in engine.collective_rpc(classes_of) for name in found}),
        "accepted": accepted,
        "together": together,
        "alone": alone,
    }


def engine_of(model: str, **named: Any) -> LLM:
    return LLM(
        model,
        seed=0,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        block_size=16,
        num_gpu_blocks_override=80,
        disable_log_stats=False,
        **named,
    )


def prompts_of(engine: LLM) -> list[list[int]]:
    asked = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    text = " ".join(prompt["text"] for prompt in asked if prompt["kind"] == "completion")
    ids = engine.get_tokenizer()(text)["input_ids"]
    return [ids[200 * index :][:length] for index, length in enumerate(LENGTHS)]


def generate(engine: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
        use_tqdm=False,
    )
    return [
        {
            "prompt": prompt,
            "tokens": list(output.token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(output.logprobs, output.token_ids, strict=True)
            ],
        }
        for prompt, output in zip(prompts, (answer.outputs[0] for answer in answers), strict=True)
    ]


def classes_of(worker: Any) -> list[str]:
    """The modules that the model's layers and their attention come from, and the drafter's."""
    runner = worker.model_runner
    models = [runner.model, *filter(None, [getattr(runner.speculator, "model", None)])]
    parts = ("ForCausalLM", "DecoderLayer", "Attention", "MTP")
    return [
        f"{type(module).__module__}.{type(module).__name__}"
        for model in models
        for module in model.modules()
        if type(module).__name__.endswith(parts)
    ]


def score(model: str, sequences: list[dict[str, Any]]) -> list[list[float]]:
    """By how much the generic class prefers another token to each new one, teacher-forced."""
    engine = engine_of(model, dtype="float32")
    scored = engine.generate(
        [{"prompt_token_ids": each["prompt"] + each["tokens"]} for each in sequences],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )
    gaps = []
    for each, answer in zip(sequences, scored, strict=True):
        steps = answer.prompt_logprobs[len(each["prompt"]) :]
        gaps.append(
            [
                max(entry.logprob for entry in step.values()) - step[token].logprob
                for token, step in zip(each["tokens"], steps, strict=True)
            ]
        )
    return gaps


if __name__ == "__main__":
    main()
