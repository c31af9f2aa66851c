"""A model with sparse attention in an engine on CPU: prompts in parts, decoded with drafts.

    PYTHON_OF_A_RELEASE sparse_engine_world.py MODEL TOP RESULT

in the environment of an engine. TOP is how many positions an indexer chooses. Writes what it made
of prompts of unequal length as JSON, for `sparse_reference_world.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

PROMPTS = Path(__file__).resolve().parents[2] / "cluster_configs/models/demo-prompts.json"
LENGTHS = (9, 200, 61, 130)
NEW_TOKENS = 24


def main() -> None:
    model, top, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    engine = LLM(
        model,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        num_gpu_blocks_override=80,
        disable_log_stats=False,
        hf_overrides={"index_topk": top},
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    )
    tokenizer = engine.get_tokenizer()
    asked = json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]
    text = " ".join(prompt["text"] for prompt in asked[-60:])
    ids = tokenizer(text)["input_ids"]
    prompts = [ids[5 * length :][:length] for length in LENGTHS]
    scored = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    counters = {metric.name: metric for metric in engine.get_metrics()}
    sequences = [
        {
            "prompt": prompt,
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                position[token].logprob
                for position, token in zip(score.prompt_logprobs[1:], prompt[1:], strict=True)
            ],
        }
        for prompt, score, answer in zip(prompts, scored, answers, strict=True)
    ]
    record = {
        "sequences": sequences,
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"].value,
        "prefix_hits": counters["vllm:prefix_cache_hits"].value,
    }
    result.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
