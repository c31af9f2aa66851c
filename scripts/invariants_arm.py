"""Ask one engine for the same answers again and again, its invariants watched more or less often.

Started by `bench_invariants.py` with an environment's python; reads a job from stdin as JSON and
writes the result to the file that the job names. The engine core runs in this process, so that it
can be switched between two batches of requests, as its workers are.

A job:
    engine      keyword arguments of vllm.LLM
    prompts     file with prompts (cluster_configs/models/demo-prompts.json)
    requests    so many of them are a batch
    tokens      of each answer
    batches     for each: look at every nth step; 0 for vLLM's own functions in place of watching
    counted     sizes of another model, whose checked step is counted and not run:
                tokens (of steps), hidden (numbers of a token that each tensor hands over), dtype
    result      where to write

The result: batches (seconds, tokens and steps compared of each), violations, and counted (for each
number of tokens what `Watch.step` has the device do).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from inspect import getclosurevars
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import LLM, SamplingParams
from vllm.v1.engine.core import EngineCore

from mtppp_patches import invariants
from mtppp_patches.engine_spec import RUN_DIR_VARIABLE
from mtppp_patches.observations import SAME_STEP, read_counts
from relay_arm import Prompts

HANDED_OVER = ("hidden_states", "residual")


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(**job["engine"])
    prompts = Prompts(Path(job["prompts"]), llm.get_tokenizer())
    batch = prompts.some(prompts.completion, job["requests"])
    engine = Engine(llm)
    result = {
        "batches": [asdict(engine.answer(batch, job["tokens"], every)) for every in job["batches"]],
        "violations": sum(counts()[1].values()),
        "counted": {tokens: count(tokens, **job["counted"]) for tokens in job["steps"]},
    }
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def counts() -> tuple[Any, Any]:
    """Checks and violations by invariant, so far."""
    return read_counts(Path(os.environ[RUN_DIR_VARIABLE]))


@dataclass(frozen=True)
class Batch:
    """Some requests, answered.

    Attributes:
        seconds: from the first request to the last answer.
        tokens: of all answers.
        compared: steps of which all ranks had told, by the end.
    """

    seconds: float
    tokens: int
    compared: int


class Engine:
    """An engine whose watching can be switched while it has no request."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._watching = EngineCore.post_step
        found = getclosurevars(self._watching).nonlocals
        self._own, self._monitors = found["original"], found["monitors"]

    def answer(self, prompts: list[list[int]], tokens: int, every: int) -> Batch:
        """Have all prompts continued by so many tokens, looking at each nth step."""
        self._switch(every)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        before = counts()[0][SAME_STEP]
        began = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        compared = counts()[0][SAME_STEP] - before
        return Batch(seconds, sum(len(one.outputs[0].token_ids) for one in outputs), compared)

    def _switch(self, every: int) -> None:
        EngineCore.post_step = self._watching if every else self._own
        for monitor in self._monitors.values():
            monitor._every = invariants._COLLECT_EVERY * every
        self._llm.collective_rpc(switch, args=(every,))


def switch(worker: Any, every: int) -> None:
    """Called in each worker, between the same two steps of all.

    Modules travel by name: this is the worker's own WATCH.
    """
    runner = next(one for one in type(worker.model_runner).__mro__ if "execute_model" in vars(one))
    watch = invariants.WATCH
    # What watches was put there before the first call; it is kept for the others.
    watching = vars(watch).setdefault("watching", runner.execute_model)
    runner.execute_model = watching if every else getclosurevars(watching).nonlocals["original"]
    watch.sample_every = max(1, every)


class Counted(TorchDispatchMode):
    """Counts what torch's operators do meanwhile; views cost nothing.

    Attributes:
        kernels: operators that compute something.
        operations: one for each element of the larger of what an operator reads and writes.
        read, written: bytes of tensors, each operator's by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operations = self.read = self.written = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self.kernels += 1
        self.operations += max(one.numel() for one in (*given, result))
        self.read += sum(one.nbytes for one in given)
        self.written += result.nbytes
        return result


def count(tokens: int, *, hidden: int, dtype: str) -> dict[str, int]:
    """What a checked step of so many tokens costs a rank that hands over to the next stage."""
    watch = invariants.Watch()
    watch.serve()
    ids = torch.empty(tokens, dtype=torch.int32, device="meta")
    tensor = torch.empty(tokens, hidden, dtype=getattr(torch, dtype), device="meta")
    handed_over = SimpleNamespace(tensors=dict.fromkeys(HANDED_OVER, tensor))
    with Counted() as counted:
        watch.step(SimpleNamespace(num_tokens=tokens, input_ids=ids), handed_over)
    [(_, _, sums, _)] = watch._copied
    return {
        "kernels": counted.kernels,
        "operations": counted.operations,
        "bytes_read": counted.read,
        "bytes_written": counted.written,
        "bytes_to_host": sums.nbytes,
    }


if __name__ == "__main__":
    main()
