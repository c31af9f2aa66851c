"""Run one engine over scripted requests and report what came out, step by step.

Started by `relay_matrix.py` with an environment's python; reads a job from stdin as JSON and
writes the result to the file that the job names. The engine core runs in this process, so that a
request is aborted after exactly as many tokens as the script says; the workers are processes of
their own as always.

A job:
    engine      keyword arguments of vllm.LLM
    prompts     file with prompts (cluster_configs/models/demo-prompts.json)
    scenarios   names of those to run, see `SCENARIOS`; or
    score       list of {prompt, tokens}: teacher-forced instead of generating
    result      where to write

The result of generating, per scenario and request: prompt (ids), steps (the tokens of each engine
step that yielded some), text, finish ("stop", "length", "abort"), cached (tokens of the prompt
whose keys and values were those of an earlier request); preemptions per scenario; counters of the
engine, and how many requests began with placeholders for drafts.
The result of scoring, per sequence and token: gap (logprob of the best token minus logprob of this
one, nats) and best (probability of the best token).
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

DIGITS = r"[0-9]{3}-[0-9]{4}"
ROW = r'\{"id": [0-9]{1,3}, "name": "[A-Z][a-z]{1,8}"\}'


@dataclass
class Request:
    """One scripted request; greedy unless `temperature` is set."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False
    abort_after: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    regex: str | None = None


@dataclass
class Answer:
    """What an engine made of a request."""

    prompt: list[int]
    regex: str | None
    sampled: bool
    cached: int = 0
    steps: list[list[int]] = field(default_factory=list)
    finish: str = ""
    text: str = ""


class Prompts:
    """The demo prompts, as token ids."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        data = json.loads(file.read_text(encoding="utf-8"))["prompts"]
        self._tokenizer = tokenizer
        self._random = random.Random(7)
        self.chat = [self._chat(p["text"]) for p in data if p["kind"] == "chat"]
        self.completion = [self._text(p["text"]) for p in data if p["kind"] == "completion"]

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def _chat(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def some(self, kind: list[list[int]], count: int) -> list[list[int]]:
        """`count` different prompts, the same ones in every run."""
        return self._random.sample(kind, count)

    def long(self, length: int) -> list[int]:
        """A prompt of exactly `length` tokens, made of others."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self._random.choice(self.completion)
        return ids[:length]


Scenario = Callable[[Prompts], Iterator[list[Request]]]
"""Yields waves of requests; the next wave starts when the one before has ended."""


def long_outputs(prompts: Prompts) -> Iterator[list[Request]]:
    yield [Request(p, 120, ignore_eos=True) for p in prompts.some(prompts.completion, 4)]


def ends(prompts: Prompts) -> Iterator[list[Request]]:
    """Ends at EOS, and at each small max_tokens, where drafts reach beyond the end."""
    yield [Request(p, 60) for p in prompts.some(prompts.chat, 6)]
    chosen = prompts.some(prompts.completion, 24)
    yield [Request(p, 1 + i % 12, ignore_eos=True) for i, p in enumerate(chosen)]


def more_than_slots(prompts: Prompts) -> Iterator[list[Request]]:
    chosen = prompts.some(prompts.chat, 8) + prompts.some(prompts.completion, 8)
    yield [Request(p, 10 + 5 * (i % 6)) for i, p in enumerate(chosen)]


def aborts(prompts: Prompts) -> Iterator[list[Request]]:
    """Every other request is aborted somewhere in the middle; others take over its slot."""
    chosen = prompts.some(prompts.completion, 14)
    yield [
        Request(p, 40, ignore_eos=True, abort_after=(3 + i) if i % 2 else None)
        for i, p in enumerate(chosen)
    ]


def chunked_prefill(prompts: Prompts) -> Iterator[list[Request]]:
    """Prompts of several times the token budget, between requests that decode."""
    short = [Request(p, 60, ignore_eos=True) for p in prompts.some(prompts.completion, 3)]
    long = [Request(prompts.long(n), 20, ignore_eos=True) for n in (150, 97, 210)]
    yield [short[0], long[0], short[1], long[1], short[2], long[2]]


def prefix_hits(prompts: Prompts) -> Iterator[list[Request]]:
    """A, B, A, and A with another ending."""
    a, b = prompts.long(140), prompts.long(140)
    for ids in (a, b, a, a[:100] + b[:9]):
        yield [Request(ids, 24, ignore_eos=True)]
    yield [Request(ids, 24, ignore_eos=True) for ids in (a, b, a, b)]


def preemption(prompts: Prompts) -> Iterator[list[Request]]:
    """More KV cache wanted than there is, if the job makes it small."""
    yield [Request(prompts.long(40 + 7 * i), 100, ignore_eos=True) for i in range(6)]


def structured(prompts: Prompts) -> Iterator[list[Request]]:
    """Requests under a grammar, alone and among others; many, since which micro-batches meet, and
    so whether one's drafts pass for another's, is a matter of timing."""
    chosen = prompts.some(prompts.completion, 24)
    yield [Request(chosen[0], 60, regex=ROW)]
    yield [
        Request(p, 60, regex=(ROW, None, DIGITS)[i % 3], ignore_eos=i % 3 == 1)
        for i, p in enumerate(chosen)
    ]


def sampled(prompts: Prompts) -> Iterator[list[Request]]:
    chosen = prompts.some(prompts.completion, 16)
    yield [Request(p, 30, ignore_eos=True, temperature=1.0, seed=i) for i, p in enumerate(chosen)]


def one_left(prompts: Prompts) -> Iterator[list[Request]]:
    """Prompts of one token, admitted between requests that decode.

    vLLM pads the first step of such a request with placeholders for drafts (since 0.25.1), under a
    grammar, too. Prompts of which all but one token are cached do not come to that: with drafts
    the last block of what is cached is computed again.
    """
    single = [ids[-1:] for ids in prompts.some(prompts.completion, 16)]
    admitted = [
        Request(ids, 60, regex=ROW) if i % 3 == 2 else Request(ids, 6 + i, ignore_eos=True)
        for i, ids in enumerate(single)
    ]
    decoding = [Request(p, 140, ignore_eos=True) for p in prompts.some(prompts.completion, 2)]
    yield [*decoding, *admitted]


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        long_outputs,
        ends,
        more_than_slots,
        aborts,
        chunked_prefill,
        prefix_hits,
        preemption,
        structured,
        sampled,
        one_left,
    )
}


def generate(llm: LLM, name: str, prompts: Prompts) -> list[Answer]:
    engine = llm.llm_engine
    decode = llm.get_tokenizer().decode
    answers: list[Answer] = []
    for wave, requests in enumerate(SCENARIOS[name](prompts)):
        running: dict[str, tuple[Request, Answer]] = {}
        for index, request in enumerate(requests):
            answer = Answer(request.prompt, request.regex, request.temperature > 0)
            answers.append(answer)
            running[f"{name}-{wave}-{index}"] = request, answer
            engine.add_request(
                f"{name}-{wave}-{index}", {"prompt_token_ids": request.prompt}, params_of(request)
            )
        while engine.has_unfinished_requests():
            for output in engine.step():
                request, answer = running[output.request_id]
                if answer.finish:
                    continue
                completion = output.outputs[0]
                answer.cached = output.num_cached_tokens or 0
                if completion.token_ids:
                    answer.steps.append(list(completion.token_ids))
                if output.finished:
                    answer.finish = completion.finish_reason
                elif request.abort_after and sum(map(len, answer.steps)) >= request.abort_after:
                    engine.abort_request([output.request_id])
                    answer.finish = "abort"
    for answer in answers:
        tokens = [token for step in answer.steps for token in step]
        answer.text = decode(tokens, skip_special_tokens=True)
    return answers


def params_of(request: Request) -> SamplingParams:
    grammar = StructuredOutputsParams(regex=request.regex) if request.regex else None
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        structured_outputs=grammar,
        output_kind=RequestOutputKind.DELTA,
    )


def score(llm: LLM, sequences: list[dict[str, list[int]]]) -> list[list[dict[str, float]]]:
    outputs = llm.generate(
        [{"prompt_token_ids": s["prompt"] + s["tokens"]} for s in sequences],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )
    scored = []
    for sequence, output in zip(sequences, outputs, strict=True):
        positions = output.prompt_logprobs[len(sequence["prompt"]) :]
        tokens = []
        for token, logprobs in zip(sequence["tokens"], positions, strict=True):
            best = max(entry.logprob for entry in logprobs.values())
            tokens.append({"gap": best - logprobs[token].logprob, "best": math.exp(best)})
        scored.append(tokens)
    return scored


class PaddedSteps:
    """Counts the requests whose first step the scheduler pads with placeholders for drafts.

    Where the engine core has a process of its own, as in a test of how that ends, it sees nothing.
    """

    def __init__(self, llm: LLM) -> None:
        self.count = 0
        core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is not None:
            self._schedule = core.scheduler.schedule
            core.scheduler.schedule = self._counted

    def _counted(self, *arguments: Any, **named: Any) -> Any:
        scheduled = self._schedule(*arguments, **named)
        drafts = scheduled.scheduled_spec_decode_tokens
        self.count += sum(new.req_id in drafts for new in scheduled.scheduled_new_reqs)
        return scheduled


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name and hasattr(m, "value"))


def main() -> None:
    job = json.load(sys.stdin)
    llm = LLM(**job["engine"], disable_log_stats=False)
    if "score" in job:
        result: Any = score(llm, job["score"])
    else:
        prompts = Prompts(Path(job["prompts"]), llm.get_tokenizer())
        padded = PaddedSteps(llm)
        scenarios, preemptions = {}, {}
        for name in job["scenarios"]:
            before = metric(llm, "vllm:num_preemptions")
            scenarios[name] = [vars(answer) for answer in generate(llm, name, prompts)]
            preemptions[name] = metric(llm, "vllm:num_preemptions") - before
        result = {
            "scenarios": scenarios,
            "preemptions": preemptions,
            # vLLM's own counter loses some on 0.26.0 and 0.27.1, of steps without output.
            "prefix_hits": sum(
                answer["cached"] for answers in scenarios.values() for answer in answers
            ),
            "padded_first_steps": padded.count,
            "drafts": metric(llm, "vllm:spec_decode_num_drafts"),
            "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        }
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
