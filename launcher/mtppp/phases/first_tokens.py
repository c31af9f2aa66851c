"""Ask for the first tokens: text, chat if the model has a template, drafts if MTP is on."""

from __future__ import annotations

import time

from mtppp.console import Step
from mtppp.engine.client import BadAnswer, EngineClient, Generated
from mtppp.errors import MtpppError
from mtppp.phases.deployment import Deployment
from mtppp.phases.phase import WithoutTrace

PROMPT = "count 17 by 5: 17 22 27 32"
QUESTION = "What is two plus three?"
TOKENS = 32
DEADLINE = 300.0  # seconds; the first request may still compile kernels


class FirstTokens(WithoutTrace):
    title = "first tokens"

    def run(self, deployment: Deployment, step: Step) -> None:
        plan = deployment.plan
        with deployment.engine(plan.endpoint, timeout=DEADLINE) as client:
            served = client.models()
            if plan.served_name not in served:
                raise MtpppError(
                    f"{plan.endpoint} serves {', '.join(served)}, not {plan.served_name}",
                    hint="another server answers there; set serve.port to a free one",
                )
            started = time.monotonic()
            answer = client.complete(plan.served_name, PROMPT, max_tokens=TOKENS, temperature=0)
            seconds = time.monotonic() - started
            if answer.tokens == 0:
                raise MtpppError(
                    f"{plan.endpoint} answered {PROMPT!r} with no token at all",
                    hint=f"the server's log is {_server_log(deployment)}",
                )
            if plan.draft_tokens and client.acceptance().drafts == 0:
                raise MtpppError(
                    f"{plan.endpoint}: tokens come, but the drafter drafted none",
                    hint="speculative decoding is configured and does not happen; the server's log"
                    f" is {_server_log(deployment)}",
                )
            chat = _chat(client, plan.served_name)
        step.note = f"{answer.text!r} ({answer.tokens} tokens in {seconds:.1f} s)" + (
            f"; chat: {chat.text!r}" if chat else "; the model has no chat template"
        )


def _server_log(deployment: Deployment) -> str:
    node, planned = deployment.head
    return f"{node.host}:{planned.directory}/{deployment.plan.server.log}"


def _chat(client: EngineClient, model: str) -> Generated | None:
    """An answer to a question; None where the model has no chat template."""
    try:
        return client.chat(model, QUESTION, max_tokens=TOKENS, temperature=0)
    except BadAnswer as error:
        if error.status == 400 and "chat template" in error.message:
            return None
        raise
