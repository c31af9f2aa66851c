"""Notes, on CPU hosts, which blocks of the KV cache sparse attention reads for whom.

A request owns the blocks that its positions lie in. Whatever else attention reads for it is
another's, or was. Counts go to `reads-PID.json` in the run directory.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from mtppp_patches.engine_spec import RUN_DIR_VARIABLE


def watch() -> None:
    """Have attention note what it reads."""
    from mtppp_cpu import sparse_attention

    implementation = sparse_attention.SparseLatentImpl
    original = implementation.forward_mqa
    if hasattr(original, "__wrapped__"):
        return
    counts: Counter[str] = Counter()
    file = Path(os.environ[RUN_DIR_VARIABLE]) / f"reads-{os.getpid()}.json"

    @functools.wraps(original)
    def forward_mqa(self: Any, q: Any, cache: Any, step: Any, layer: Any) -> Any:
        before = counts["beyond"]
        counts.update(reads_of(step, self.topk_indices_buffer, cache.shape[1]))
        if counts["beyond"] > before:
            file.write_text(json.dumps(counts), encoding="utf-8")
        return original(self, q, cache, step, layer)

    implementation.forward_mqa = forward_mqa


def reads_of(step: Any, positions: Any, size: int) -> Counter[str]:
    """`beyond`: positions read that the token's request does not have; `others`: those of them in a
    block that another request of the step owns.

    Args:
        step: SparseMetadata.
        positions: [tokens, top] that the tokens attend to; negative: none.
        size: positions per block.
    """
    counts: Counter[str] = Counter()
    table = step.block_table.tolist()
    owned = [
        set(row[: -(-n // size)]) for row, n in zip(table, step.lengths.tolist(), strict=False)
    ]
    for token, request in enumerate(step.request_of.tolist()):
        own = owned[request]
        others = set().union(*owned) - own
        for position in positions[token].tolist():
            if int(step.lengths[request]) <= position < len(table[request]) * size:
                counts["beyond"] += 1
                counts["others"] += table[request][position // size] in others
    return counts
