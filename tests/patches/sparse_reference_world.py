"""What transformers makes of what an engine made of sparse attention.

    PYTHON_WITH_TRANSFORMERS sparse_reference_world.py MODEL TOP RESULT

Scores every token of a result of `sparse_engine_world.py`, without caches or pages. Prints how the
two differ as a JSON object.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave


def main() -> None:
    model, top, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    record = json.loads(result.read_text(encoding="utf-8"))
    reference = Reference(model)
    differences: list[float] = []
    gaps: list[float] = []
    for sequence in record["sequences"]:
        prompt, tokens = sequence["prompt"], sequence["tokens"]
        logprobs = reference.logprobs(prompt + tokens, top)
        for position, ours in enumerate(sequence["logprobs"], start=1):
            theirs = float(logprobs[position - 1, prompt[position]])
            differences.append(abs(ours - theirs))
        for position, token in enumerate(tokens, start=len(prompt)):
            before = logprobs[position - 1]
            gaps.append(float(before.max() - before[token]))
    longest = max((sequence["prompt"] for sequence in record["sequences"]), key=len)
    everything = reference.logprobs(longest, len(longest))
    matters = (reference.logprobs(longest, top) - everything).abs().max()
    found = {
        "prompt_tokens": len(differences),
        "largest_difference": max(differences),
        "new_tokens": len(gaps),
        "largest_gap": max(gaps),
        "without_choosing": float(matters),
    }
    print(json.dumps(found), flush=True)


class Reference:
    """transformers' model, its indexers rounding to float8 as those of engines do."""

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        for part in self._model.modules():
            if hasattr(part, "kv_a_layernorm"):
                # transformers has its own number here, vLLM the model's.
                part.q_a_layernorm.variance_epsilon = self._model.config.rms_norm_eps
                part.kv_a_layernorm.variance_epsilon = self._model.config.rms_norm_eps
        self._indexers = [part for part in self._model.modules() if hasattr(part, "wq_b")]
        for indexer in self._indexers:
            indexer.forward = partial(choose, indexer)

    @torch.no_grad()
    def logprobs(self, tokens: list[int], top: int) -> torch.Tensor:
        for indexer in self._indexers:
            indexer.index_topk = top
        logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0].log_softmax(dim=-1)


def choose(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    heads, rotary = indexer.n_heads, indexer.qk_rope_head_dim
    queries = indexer.wq_b(q_resid).unflatten(-1, (heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated_queries, rotated_keys = apply_rotary_pos_emb_interleave(
        queries[..., :rotary], keys[..., :rotary], *position_embeddings, unsqueeze_dim=2
    )
    queries = rounded(torch.cat((rotated_queries, queries[..., rotary:]), dim=-1))
    keys = rounded(torch.cat((rotated_keys, keys[..., rotary:]), dim=-1))[:, :, 0]
    by_head = torch.einsum("bqhd,bkd->bhqk", queries, keys).relu() * indexer.softmax_scale
    weights = indexer.weights_proj(hidden_states) * heads**-0.5
    scores = torch.einsum("bhqk,bqh->bqk", by_head, weights) + attention_mask
    best = scores.sort(dim=-1, descending=True, stable=True).indices
    return best[..., : indexer.index_topk]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To float8 with one power of two per vector as scale, and back."""
    scale = 2.0 ** torch.ceil(torch.log2(values.abs().amax(dim=-1, keepdim=True) / 448))
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


if __name__ == "__main__":
    main()
