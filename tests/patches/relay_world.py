"""The relay between a first and a last stage, in one process, with streams that are recorded.

    PYTHON_OF_A_RELEASE relay_world.py

PPHandler and the runner's `sample_tokens` and `update_pp_decode_requests` are the release's,
patched by the plugin. On CPUs streams do nothing, so nothing of an engine there tells whether one
waits for another or whether memory is given back too early. Here each operation on a tensor is
noted with the stream that it would run on; `Recorder` says what follows from that. Prints one JSON
object.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.worker.gpu import model_runner, pp_utils
from vllm.version import __version__

from mtppp_patches.draft_relay import PATCH
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import install, vllm_root

RELEASE = __version__.partition("+")[0]
DRAFTS, SLOTS, STAGES = 3, 4, 2
KNOWN = 99
"""Drafts that a stage knows already of the request that took over a slot."""


class Stream:
    """A queue of a GPU: how much of its own and of other streams' work it has behind it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: Counter[Stream] = Counter()

    def record_event(self) -> Counter[Stream]:
        return self.done.copy()

    def wait_event(self, event: Counter[Stream]) -> None:
        self.done |= event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.done)


class Recorder(TorchDispatchMode):
    """Notes which stream reads and writes which memory.

    Attributes:
        problems: what one stream does to memory without waiting for another that is not done with
            it; and, after `check_lifetimes`, memory used beside the stream that it was allocated
            on, whose allocator was not told: it may be given away before that use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._current: Stream | None = None
        self._allocated_on: dict[int, Stream] = {}
        self._told: set[tuple[int, Stream]] = set()
        self._uses: dict[int, list[tuple[Stream, int, bool, str]]] = defaultdict(list)
        # The address of memory that was given back would be another's by now.
        self._kept: list[torch.Tensor] = []

    @property
    def current(self) -> Stream:
        assert self._current is not None
        return self._current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def told(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The allocator is told that `stream` uses this memory, too."""
        self._told.add((memory_of(tensor), stream))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        given = list(zip(func._schema.arguments, args, strict=False))
        named = {argument.name: argument for argument in func._schema.arguments}
        given += [(named[name], value) for name, value in (kwargs or {}).items()]
        self.current.done[self.current] += 1
        touched = set()
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value):
                self._use(tensor, written, str(func))
                touched.add(memory_of(tensor))
        for tensor in tensors_in(result):
            if memory_of(tensor) not in touched:
                self._use(tensor, True, str(func))
        return result

    def _use(self, tensor: torch.Tensor, written: bool, what: str) -> None:
        self._kept.append(tensor)
        memory, now = memory_of(tensor), self.current
        self._allocated_on.setdefault(memory, now)
        for stream, moment, wrote, before in self._uses[memory]:
            if (written or wrote) and now.done[stream] < moment:
                self.problems.append(
                    f"{what} on {now.name} does not wait for {before} on {stream.name}"
                )
        self._uses[memory].append((now, now.done[now], written, what))

    def check_lifetimes(self) -> None:
        for memory, uses in self._uses.items():
            home = self._allocated_on[memory]
            self.problems += [
                f"{what} on {stream.name}: memory of {home.name}, whose allocator was not told"
                for stream, _, _, what in uses
                if stream is not home and (memory, stream) not in self._told
            ]


def memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


RECORDER = Recorder()
WIRE: deque[tuple[str, list[Any]]] = deque()
"""What the last stage has sent and the first not yet taken: stream and values."""


class Runner(model_runner.GPUModelRunner):
    """One stage's runner; what the relay has nothing to do with is a stand-in."""

    def __init__(self, stage: int) -> None:
        self.is_last_pp_rank = stage == STAGES - 1
        self.main = Stream(f"main stream of stage {stage}")
        self.side = Stream(f"side stream of stage {stage}")
        self.num_speculative_steps, self.pcp_manager, self.adaptive_verification = (
            DRAFTS,
            None,
            None,
        )
        self.applied: list[list[Any]] = []
        # vLLM asks for its group, its stream and a new one when it makes the handler.
        pp_utils.get_pp_group = lambda: SimpleNamespace(
            is_last_rank=self.is_last_pp_rank,
            last_rank=STAGES - 1,
            world_size=STAGES,
            make_sibling_device_group=lambda **_: self.is_last_pp_rank,
        )
        torch.cuda.current_stream = lambda *_: self.main
        torch.cuda.Stream = lambda *_: self.side
        with RECORDER.on(self.main):
            self.pp_handler = pp_utils.PPHandler(SLOTS, DRAFTS, torch.device("cpu"))
            drafts = torch.zeros(SLOTS, DRAFTS, dtype=torch.int64)
        self.req_states = MagicMock(draft_tokens=drafts)

    def __getattr__(self, name: str) -> Any:
        # Asked for only where there is no such attribute.
        value = vars(self)[name] = MagicMock(name=name)
        return value

    def postprocess_sampled(self, idx_mapping: Any, *tensors: Any, **named: Any) -> None:
        """vLLM's kernel reads all of these on the main stream."""
        every = [idx_mapping, *(named or dict(enumerate(tensors))).values()]
        self.applied.append([tensor.tolist() for tensor in tensors_in(every)])

    def postprocess_num_computed_tokens(self, input_batch: Any) -> None:
        """A kernel over counts that no other stage has."""

    def step(self, batch: Any, sampled: Any = None, drafts: Any = None) -> None:
        """One step: what the one before the last brought, then this one's tokens."""
        with RECORDER.on(self.main):
            self.update_pp_decode_requests()
            self.execute_model_state = MagicMock(input_batch=batch)
            if self.is_last_pp_rank:
                self.sample = lambda *_: tuple(sampled)
                self.speculator.propose = lambda *_, **__: drafts
            self.sample_tokens(None)


def batch_of(rows: dict[int, tuple[int, int, int]]) -> Any:
    """Slot -> tokens computed before, scheduled, and in the prompt."""
    slots = np.array(list(rows), dtype=np.int32)
    computed, scheduled, prompt = np.array(list(rows.values()), dtype=np.int32).T
    return MagicMock(
        req_ids=[f"in-{slot}" for slot in rows],
        num_reqs=len(rows),
        idx_mapping=torch.from_numpy(slots),
        idx_mapping_np=slots,
        num_computed_tokens_np=computed,
        num_scheduled_tokens=scheduled,
        prefill_len_np=prompt,
        max_seq_len_np=np.full(len(rows), 100, dtype=np.int32),
    )


def broadcast(tensor: torch.Tensor, src: int, group: bool) -> None:
    """`group`: whether it is the last stage that calls."""
    if group:
        WIRE.append((RECORDER.current.name, tensor.tolist()))
        # Whatever it is, a collective reads it on the stream it is called on.
        tensor.clone()
    else:
        tensor.copy_(torch.tensor(WIRE.popleft()[1], dtype=tensor.dtype))


def tell_allocator(tensor: torch.Tensor, stream: Stream) -> None:
    RECORDER.told(tensor, stream)


def without_gpu() -> None:
    torch.cuda.stream = RECORDER.on
    torch.Tensor.record_stream = tell_allocator
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.distributed.broadcast = broadcast
    model_runner.AsyncOutput = model_runner.ModelRunnerOutput = MagicMock()
    model_runner.use_workspace_lane = MagicMock()


def main() -> None:
    spec = EngineSpec(
        RELEASE,
        "glm4_moe",
        pipeline=STAGES,
        speculative=Speculative("mtp", DRAFTS),
        patches=(PATCH.name,),
    )
    install((PATCH,), spec, RELEASE, vllm_root())
    without_gpu()
    with torch.inference_mode(), RECORDER:
        result = run()
    RECORDER.check_lifetimes()
    print(json.dumps({"release": RELEASE, "problems": RECORDER.problems, **result}))


def run() -> dict[str, Any]:
    """Two micro-batches in turn, as two stages have them: slots 0 and 1, and slots 2 and 3."""
    first, last = Runner(0), Runner(1)
    sent, tables = [], []

    def step(rows: dict[int, tuple[int, int, int]], width: int) -> None:
        number = len(tables) + 1
        with RECORDER.on(last.main):
            tokens = [[100 * number + 10 * slot + i for i in range(width)] for slot in rows]
            drafts = [[-token for token in range(*s)] for s in drafts_of(number, rows)]
            sampled = (
                SimpleNamespace(sampled_token_ids=torch.tensor(tokens)),
                torch.full((len(rows),), width, dtype=torch.int32),
                torch.zeros(len(rows), dtype=torch.int32),
            )
            drafts = torch.tensor(drafts)
        last.step(batch_of(rows), sampled, drafts)
        sent.append([(stream, values) for stream, values in WIRE])
        first.step(batch_of(rows))
        assert not WIRE, "taken"
        tables.append(first.req_states.draft_tokens.tolist())

    def another_takes(slot: int) -> None:
        with RECORDER.on(first.main):
            first.pp_handler.on_req_idx_freed(slot)
            first.req_states.draft_tokens[slot] = KNOWN

    step({0: (0, 4, 4), 1: (0, 4, 4)}, 1)  # Prompts: without drafts, one token each.
    step({2: (0, 4, 10)}, 1)  # A part of a prompt: nothing is sampled.
    step({0: (4, 4, 4), 1: (4, 4, 4)}, 4)
    step({2: (4, 6, 10), 3: (0, 4, 10)}, 1)  # One row of two samples.
    another_takes(1)
    step({0: (8, 4, 4)}, 4)
    another_takes(0)
    step({2: (10, 4, 10)}, 4)
    step({1: (0, 4, 10)}, 1)
    return {"sent": sent, "tables": tables, "applied": first.applied}


def drafts_of(number: int, slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    for slot in slots:
        start = 100 * number + 10 * slot
        yield start, start + DRAFTS


if __name__ == "__main__":
    main()
