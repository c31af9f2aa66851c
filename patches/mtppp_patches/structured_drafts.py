"""Keeps drafts out of steps whose output a grammar constrains.

The scheduler asks the last stage for the drafts of a request before it computes the grammar's mask
for them. The answer holds those of the most recent step only, which with pipelining is another
micro-batch's: the scheduler then masks the first position, leaves the ones after it free, and the
last stage accepts drafts there that the grammar forbids. Once a step of theirs was scheduled,
requests under a grammar therefore have no drafts in the next; other requests in the same step keep
theirs. Not covered is the step in which a request is admitted or resumed with one token left to
compute: since 0.25.1 vLLM itself may pad it with placeholders for drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import Patch, Target
from mtppp_patches.releases import releases


def _without_drafts(original: Callable[..., None], spec: EngineSpec) -> Callable[..., None]:
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.use_structured_output:
                request.spec_token_ids = []

    return _update_after_schedule


_SCHEDULER = "vllm.v1.core.sched.async_scheduler"

PATCH = Patch(
    name="structured_drafts",
    why=(
        "With pipelining, drafts of requests under a grammar (JSON schema, regex, tool calls) are "
        "accepted without having been checked against it."
    ),
    releases=releases("0.23.0", "0.31.0"),
    obsolete_by="0.32.0: GrammarOutput.num_acceptable_drafts rejects drafts that were not checked",
    scope="decode",
    wanted=lambda spec: spec.mtp and spec.pipeline > 1,
    targets=(
        Target(_SCHEDULER, "AsyncScheduler._update_after_schedule", _without_drafts),
        Target("vllm.v1.core.sched.scheduler", "Scheduler.update_draft_token_ids_in_output"),
        Target("vllm.v1.structured_output", "StructuredOutputManager.grammar_bitmask"),
        Target("vllm.v1.worker.gpu.spec_decode.utils", "DraftTokensHandler"),
    ),
)
