"""Brings the drafter's tokens from the last stage to those that must embed them.

The drafter runs on the last stage. In vLLM up to 0.29 its proposals stay there: the first stage
knows how many draft tokens a step verifies but embeds zeros for them. The last stage then accepts
its drafts on logits of other tokens, and the KV cache keeps what the zeros left.

What goes from the last stage to all others after a step in which at least one row was sampled, on
the communicator that vLLM has for it and in this order:

    sampled tokens     [rows, drafts + 1] int64, padded      vLLM's; the padding is new
    sampled, rejected  [2, rows] int32                       vLLM's
    draft tokens       [rows, drafts] int64                  new

The other stages apply it when the same requests are scheduled again, a pipeline's length of steps
later. Both sides derive from the scheduler's output alone whether a step sends anything, so they
agree on every step: warm-up, prefill only, and steps without drafts included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import releases

if TYPE_CHECKING:
    import numpy as np

Function = Callable[..., Any]


def _rows_that_sample(original: Function, spec: EngineSpec) -> Function:
    def compute_need_sampled_mask(input_batch: Any) -> np.ndarray | None:
        """Rows that end this step with a sampled token, or None if no row does.

        vLLM also leaves out rows that reach their maximal length. It judges by a count that takes
        every draft for accepted; a row whose drafts were then rejected goes on without its tokens.
        """
        end = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        sampled = end >= input_batch.prefill_len_np
        return sampled if sampled.any() else None

    return compute_need_sampled_mask


def _broadcast_at_full_width(original: Function, spec: EngineSpec) -> Function:
    from torch.nn.functional import pad

    def broadcast(
        self: Any, sampled_token_ids: Any, num_sampled: Any, num_rejected: Any, input_batch: Any
    ) -> None:
        """A step without drafts samples one column; the receivers always expect drafts + 1."""
        missing = self.max_sample_len - sampled_token_ids.shape[-1]
        padded = pad(sampled_token_ids, (0, missing))
        original(self, padded, num_sampled, num_rejected, input_batch)

    return broadcast


def _receive_drafts_too(original: Function, spec: EngineSpec) -> Function:
    import torch

    def receive(self: Any, input_batch: Any) -> bool:
        every_row_sampled: bool = original(self, input_batch)
        pending = self.queue[-1]
        if pending is None:
            return every_row_sampled
        with torch.cuda.stream(self.broadcast_stream):
            drafts = torch.empty(
                input_batch.num_reqs,
                self.max_sample_len - 1,
                dtype=torch.int64,
                device=self.device,
            )
            torch.distributed.broadcast(drafts, src=self.last_rank, group=self.broadcast_group)
            # Allocated on the side stream, read on the main one.
            drafts.record_stream(self.main_stream)
            pending.event = self.broadcast_stream.record_event()
        pending.draft_tokens = drafts
        return every_row_sampled

    return receive


def _send_drafts(original: Function, spec: EngineSpec) -> Function:
    import torch
    from vllm.v1.worker.gpu import pp_utils

    def send(runner: Any, input_batch: Any) -> None:
        if pp_utils.compute_need_sampled_mask(input_batch) is None:
            return
        handler = runner.pp_handler
        # Gathered on the main stream: the next step overwrites the table, not this copy.
        drafts = runner.req_states.draft_tokens[input_batch.idx_mapping]
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            torch.distributed.broadcast(
                drafts, src=handler.last_rank, group=handler.broadcast_group
            )
            drafts.record_stream(handler.broadcast_stream)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        step = self.execute_model_state
        output = original(self, grammar_output)
        if step is not None and self.is_last_pp_rank:
            with torch.inference_mode():
                send(self, step.input_batch)
        return output

    return sample_tokens


def _apply_drafts(original: Function, spec: EngineSpec) -> Function:
    import numpy as np
    from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu

    def update_pp_decode_requests(self: Any) -> None:
        handler = self.pp_handler
        pending = handler.queue[0] if handler.queue else None
        # Waits for what was received, unless no row of it is alive any more.
        original(self)
        if pending is None:
            return
        slots = pending.idx_mapping_np
        # A slot freed since then may belong to another request by now.
        same_request = handler.req_idx_gen_np[slots] == pending.gen_at_receive_np
        alive = pending.need_sampled_mask & same_request
        if alive.all():
            self.req_states.draft_tokens[pending.idx_mapping] = pending.draft_tokens
        elif alive.any():
            rows = async_copy_to_gpu(np.flatnonzero(alive), device=handler.device)
            index = async_copy_to_gpu(slots[alive], device=handler.device)
            self.req_states.draft_tokens[index] = pending.draft_tokens[rows]

    return update_pp_decode_requests


_PP_UTILS = "vllm.v1.worker.gpu.pp_utils"
_RUNNER = "vllm.v1.worker.gpu.model_runner"

PATCH = Patch(
    name="draft_relay",
    why=(
        "The first stage embeds zeros for the draft tokens that the last stage verifies: the text "
        "is silently corrupt. Steps without drafts are sent narrower than they are received, which "
        "desynchronises the stages or ends them during warm-up."
    ),
    releases=releases("0.23.0", "0.29.0"),
    obsolete_by="0.30.0: PPHandler.broadcast_drafts, and a padded PPHandler.broadcast",
    scope="decode",
    wanted=lambda spec: spec.mtp and spec.pipeline > 1,
    targets=(
        Target(_PP_UTILS, "compute_need_sampled_mask", _rows_that_sample),
        Target(_PP_UTILS, "PPHandler.broadcast", _broadcast_at_full_width),
        Target(_PP_UTILS, "PPHandler.receive", _receive_drafts_too),
        Target(_PP_UTILS, "PPHandler.__init__"),
        Target(_PP_UTILS, "PPHandler.get_prev_sampled_outputs"),
        Target(_PP_UTILS, "PPHandler.on_req_idx_freed"),
        Target(_PP_UTILS, "PendingRecv"),
        Target(_RUNNER, "GPUModelRunner.sample_tokens", _send_drafts),
        Target(_RUNNER, "GPUModelRunner.update_pp_decode_requests", _apply_drafts),
        Target(_RUNNER, "GPUModelRunner.execute_model"),
        Target(_RUNNER, "GPUModelRunner.finish_requests"),
        Target(_RUNNER, "GPUModelRunner.add_requests"),
        Target(_RUNNER, "GPUModelRunner._remove_request"),
        Target(_RUNNER, "GPUModelRunner.prepare_inputs"),
        Target(_RUNNER, "GPUModelRunner.postprocess_sampled"),
        Target("vllm.v1.worker.gpu.states", "RequestState"),
        Target("vllm.v1.worker.gpu.buffer_utils", "async_copy_to_gpu"),
        Target("vllm.v1.worker.gpu.input_batch", "_combine_sampled_and_draft_tokens_kernel"),
        Target("vllm.v1.worker.gpu.input_batch", "_post_update_kernel"),
    ),
)
