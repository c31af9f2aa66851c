"""The demo models' drafts in a real engine: accepted and rejected at every draft position.

With drafts that are never accepted a corrupt deployment looks right, with drafts that always are
nothing exercises rejection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from cpu_engine import engine_environment  # noqa: E402

MODELS = ROOT / "cluster_configs" / "models"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

model, prompts, result, block_size = sys.argv[1:]
prompts = json.load(open(prompts))
llm = LLM(
    model, dtype="float32", seed=0, enforce_eager=True, max_model_len=256, max_num_seqs=16,
    block_size=int(block_size), num_gpu_blocks_override=800, disable_log_stats=False,
    speculative_config={"method": "mtp", "num_speculative_tokens": 3},
)
chat = [[{"role": "user", "content": p["text"]}] for p in prompts if p["kind"] == "chat"]
text = [p["text"] for p in prompts if p["kind"] == "completion"]
greedy = SamplingParams(temperature=0, max_tokens=12)
answers = llm.chat(chat, greedy, use_tqdm=False) + llm.generate(text, greedy, use_tqdm=False)
counters = {metric.name: metric for metric in llm.get_metrics()}
json.dump({
    "answers": len(answers),
    "drafts": counters["vllm:spec_decode_num_drafts"].value,
    "accepted": counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
}, open(result, "w"))
"""


@pytest.mark.parametrize(
    ("model", "block_size"),
    [("demo-glm4-moe", 32), ("demo-deepseek-v3", 16), ("demo-glm-moe-dsa", 16)],
)
def test_every_position_is_accepted_and_rejected(
    model: str, block_size: int, vllm_python: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.json"
    pinned = json.loads((MODELS / "demo-prompts.json").read_text(encoding="utf-8"))["prompts"]
    prompts.write_text(json.dumps(pinned), encoding="utf-8")
    result = tmp_path / "result.json"
    subprocess.run(
        [
            vllm_python("0.32.0"),
            "-c",
            ENGINE,
            MODELS / model,
            prompts,
            result,
            str(block_size),
        ],
        env={
            **os.environ,
            **engine_environment(["mtppp_cpu"], tmp_path),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        check=True,
    )
    seen = json.loads(result.read_text(encoding="utf-8"))
    print(model, seen)
    assert seen["answers"] >= 200
    shares = [count / seen["drafts"] for count in seen["accepted"]]
    assert len(shares) == 3
    assert all(0.05 <= share <= 0.95 for share in shares), shares
