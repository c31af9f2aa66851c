"""Requests of unequal length on stages that are cut somewhere, in an engine on CPU.

    PYTHON_OF_A_RELEASE index_cut_world.py MODEL STAGES TENSOR RESULT

in the environment of an engine; VLLM_PP_LAYER_PARTITION says where it is cut. Long requests, with
more positions than an indexer chooses, run beside a short one; then the same short one runs beside
long ones that differ from the first in some tokens, a canary. Writes, as JSON, the tokens of all
and the probabilities of the short one's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from engine_cases import fork_workers
from vllm import LLM, SamplingParams

PROMPTS = Path(__file__).resolve().parents[2] / "cluster_configs/models/demo-prompts.json"
LONG = (180, 150, 120)
CANARY = slice(40, 60)
NEW_TOKENS = 24


def main() -> None:
    model, stages, tensor, result = sys.argv[1:]
    fork_workers()
    engine = LLM(
        model,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        async_scheduling=True,
        enable_prefix_caching=False,
        pipeline_parallel_size=int(stages),
        tensor_parallel_size=int(tensor),
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        block_size=16,
        num_gpu_blocks_override=80,
    )
    asked = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    completions = [prompt["text"] for prompt in asked if prompt["kind"] == "completion"]
    ids = engine.get_tokenizer()(" ".join(completions))["input_ids"]
    short = engine.get_tokenizer()(completions[3])["input_ids"][:20]
    runs = {}
    for name, seed in (("first", None), ("canary", 1), ("other_canary", 2)):
        long = [ids[300 * index :][:length] for index, length in enumerate(LONG)]
        if seed is not None:
            numbers = random.Random(seed)
            for prompt in long:
                prompt[CANARY] = numbers.choices(range(6, 500), k=CANARY.stop - CANARY.start)
        answers = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in (*long, short)],
            SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0),
            use_tqdm=False,
        )
        outputs = [answer.outputs[0] for answer in answers]
        runs[name] = {
            "tokens": [list(output.token_ids) for output in outputs],
            "short_logprobs": [
                step[token].logprob
                for step, token in zip(outputs[-1].logprobs, outputs[-1].token_ids, strict=True)
            ],
        }
    Path(result).write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
