"""A run: ask both servers all there is to ask. What is in the record is not asked again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from mtppp.engine.bulk import Answer, BulkClient, Scores, for_each
from mtppp.engine.client import Acceptance
from mtppp.errors import ConfigurationError, Inconclusive
from mtppp.verify import measure
from mtppp.verify.control import FEWEST, MOST, RUINED_REQUESTS, Damaged, damage, ruin
from mtppp.verify.formats import format_of, gaps_of
from mtppp.verify.power import fewest_that_fail
from mtppp.verify.prompts import KNOWN_ANSWERS, KnownAnswer, Prompt
from mtppp.verify.record import NOT_SCORED, Record
from mtppp.verify.servers import Identity, Server, changed, differences, survey
from mtppp.verify.stored import compare
from mtppp.verify.tiers import HARD_GAP, Tier

CONFIRMED_REQUESTS = 64
"""At least; more where a FAIL needs more."""
DIRECTED_REQUESTS = 64
FORMAT_REQUESTS = 4
LIKELIEST = 8
"""Tokens whose probabilities are asked for, at each position of what a stored baseline keeps and of
what was sampled."""
SHORTEST_PROMPT = 4
KNOWN_TOKENS = 12

_WORST = 5
_CONTEXT = 16  # tokens shown before a worst one

Objection = tuple[float, str, int, int]
"""Gap in nats, prompt, position in the answer, the token that is wanted there."""
Progress = Callable[[str, int, int], None]
"""(what is asked, how much of it is done, of how much)"""
Judging = Literal["baseline", "candidate", "nobody"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How servers are asked.

    Attributes:
        timeout: seconds for one answer.
        same_model: the operator says that both have the same weights, whatever their paths.
    """

    tier: Tier
    concurrency: int = 16
    timeout: float = 600.0
    same_model: bool = False


class Asking:
    """One server, while it is asked: its client, the model's name there, and the record."""

    def __init__(self, client: BulkClient, model: str, record: Record, progress: Progress) -> None:
        self.client = client
        self.model = model
        self._record = record
        self._progress = progress

    async def answer(
        self,
        stage: str,
        keys: Collection[str],
        tokens: int,
        *,
        temperature: float = 0.0,
        concurrency: int | None = None,
    ) -> None:
        """Have prompts continued."""
        done = self._record.answers.setdefault(stage, {})

        async def work(key: str) -> Answer:
            ids = self._record.prompts[key][1]
            return await self.client.generate(self.model, ids, tokens, temperature=temperature)

        await self._each(
            f"{self.client.role}: {'sampled' if temperature else 'greedy'} answers",
            [key for key in keys if key not in done],
            work,
            partial(self._record.add_answer, stage),
            of=len(keys),
            concurrency=concurrency,
        )

    async def score(
        self, stage: str, answers: Mapping[str, tuple[str, Sequence[int]]], *, alone: bool = False
    ) -> None:
        """Score answers; name -> (key of the prompt, tokens). Empty ones have empty scores."""
        done = self._record.scores.setdefault(stage, {})

        async def work(name: str) -> Scores:
            key, tokens = answers[name]
            ids = self._record.prompts[key][1]
            return await self.client.score(self.model, [*ids, *tokens], len(ids))

        await self._each(
            f"{self.client.role}: scores ({stage})",
            [name for name in answers if name not in done],
            work,
            partial(self._record.add_scores, stage),
            of=len(answers),
            concurrency=1 if alone else None,
        )

    async def keep_likeliest(self) -> None:
        """Score the null's answers, and keep what else would have been likely at each token."""
        record = self._record
        done = record.scores.setdefault("null", {})
        answers = {key: a.tokens for key, a in record.answers["null"].items() if a.tokens}

        async def work(key: str) -> tuple[Scores, list[dict[int, float]]]:
            ids = record.prompts[key][1]
            whole = [*ids, *answers[key]]
            return await self.client.likeliest(self.model, whole, len(ids), LIKELIEST)

        def keep(key: str, result: tuple[Scores, list[dict[int, float]]]) -> None:
            # Scores are written last: what has them is complete.
            record.add_likeliest(key, result[1])
            record.add_scores("null", key, result[0])

        await self._each(
            "baseline: scores",
            [key for key in answers if key not in done],
            work,
            keep,
            of=len(answers),
            concurrency=None,
        )

    async def score_sampled(self) -> None:
        """Score what was sampled, and keep how likely all but the likeliest would have been."""
        record = self._record
        done = record.scores.setdefault("sampled", {})
        answers = _emitted(record, "sampled")

        async def work(key: str) -> tuple[Scores, list[float]]:
            ids = record.prompts[key][1]
            whole = [*ids, *answers[key][1]]
            scores, likeliest = await self.client.likeliest(self.model, whole, len(ids), LIKELIEST)
            tokens = zip(answers[key][1], scores.rank, likeliest, strict=True)
            return scores, [_rest(*token) for token in tokens]

        def keep(key: str, result: tuple[Scores, list[float]]) -> None:
            # Scores are written last: what has them is complete.
            record.add_rest(key, result[1])
            record.add_scores("sampled", key, result[0])

        await self._each(
            f"{self.client.role}: scores (sampled)",
            [key for key in answers if key not in done or key not in record.rest],
            work,
            keep,
            of=len(answers),
            concurrency=None,
        )

    async def _each(
        self,
        what: str,
        todo: Sequence[str],
        work: Callable[[str], Awaitable[Any]],
        keep: Callable[[str, Any], None],
        *,
        of: int,
        concurrency: int | None,
    ) -> None:
        finished = of - len(todo)

        def done(key: str, result: Any) -> None:
            nonlocal finished
            keep(key, result)
            finished += 1
            self._progress(what, finished, of)

        await for_each(todo, work, done, concurrency or self.client.concurrency)


def run(
    record: Record,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    candidate: Server | None,
    baseline: Server | None,
    judging: Judging,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> None:
    """Ask everything that is not in the record yet.

    Without a candidate its answers must be in the record.

    Args:
        judging: who scores the candidate's answers.
        about: role -> what is known of a server besides what it says.

    Raises:
        Inconclusive: a server did not do what was asked of it.
        ConfigurationError: a server refuses what it was asked, by a fault of ours.
    """
    asyncio.run(_run(record, settings, prompts, candidate, baseline, judging, about, progress))


async def _run(
    record: Record,
    settings: Settings,
    prompts: Sequence[Prompt],
    candidate: Server | None,
    baseline: Server | None,
    judging: Judging,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> None:
    async with AsyncExitStack() as stack:
        asking: dict[str, Asking] = {}
        for server in filter(None, (candidate, baseline)):
            client = await stack.enter_async_context(_client(server, settings))
            asking[server.role] = await _introduced(client, server, record, about, progress)
        ours, theirs = asking.get("candidate"), asking.get("baseline")
        if not settings.same_model and mismatches(record):
            return
        tokens = await _prepare(record, settings.tier, prompts, ours, theirs)
        if record.notes["tokenizer"]["differs"]:
            return
        if ours:
            await _candidate(record, settings.tier, ours, tokens)
        if judging == "nobody":
            return
        scorer = ours if judging == "candidate" else theirs
        assert scorer is not None
        if theirs:
            await _null(record, settings.tier, theirs, tokens)
        await _scores(record, settings.tier, scorer)
        if theirs and ours:
            await _directions(record, ours)
            await _formats(record, (ours, theirs))
        if not theirs:
            await _known_answers(record, scorer)
        await _context(record, scorer, _objections(record))


def record_baseline(
    record: Record,
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    baseline: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> None:
    """Have a baseline answer twice and score its answers, to judge others later without it.

    Raises:
        as `run`.
    """

    async def ask() -> None:
        async with _client(baseline, settings) as client:
            theirs = await _introduced(client, baseline, record, about, progress)
            tokens = await _prepare(record, settings.tier, prompts, None, theirs)
            record.note("asked", {"tokens": tokens})
            keys = list(record.prompts)
            before = await client.acceptance()
            await theirs.answer("null", keys, tokens)
            _keep_acceptance(record, "baseline", before, await client.acceptance())
            # Once more in another order and with fewer at a time, so that steps are shared anew.
            fewer = max(1, settings.concurrency // 2)
            await theirs.answer("again", keys[::-1], tokens, concurrency=fewer)
            await theirs.keep_likeliest()

    asyncio.run(ask())


def run_stored(
    record: Record,
    settings: Settings,
    prompts: Sequence[Prompt],
    stored: Record,
    *,
    candidate: Server,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> None:
    """Ask a candidate what a stored baseline was asked, and have it score the stored answers.

    Raises:
        as `run`.
    """

    async def ask() -> None:
        async with _client(candidate, settings) as client:
            ours = await _introduced(client, candidate, record, about, progress)
            if not settings.same_model and mismatches(record):
                return
            for key, (kind, ids) in stored.prompts.items():
                if key not in record.prompts:
                    record.add_prompt(key, kind, ids)
            # The ids are the baseline's; the candidate's tokenizer is compared with them.
            await _prepare(record, settings.tier, prompts, ours, None)
            if record.notes["tokenizer"]["differs"]:
                return
            tokens = stored.notes["asked"]["tokens"]
            await _candidate(record, settings.tier, ours, tokens, sampled=False)
            answers = {
                key: (key, answer.tokens)
                for key, answer in stored.answers["null"].items()
                if answer.tokens
            }
            await ours.score("reverse", answers)
            if any(max(one.gap) > HARD_GAP for one in record.scores["reverse"].values()):
                await _format(record, ours, list(answers.values()))
            await _context(record, ours, _partings(record, stored))

    asyncio.run(ask())


def _client(server: Server, settings: Settings) -> BulkClient:
    return BulkClient(
        server.url,
        role=server.role,
        key=server.key,
        timeout=settings.timeout,
        concurrency=settings.concurrency,
        socket=server.socket,
        headers=server.headers,
    )


async def _introduced(
    client: BulkClient,
    server: Server,
    record: Record,
    about: Mapping[str, dict[str, Any]],
    progress: Progress,
) -> Asking:
    """A server that has said what it is.

    Raises:
        ConfigurationError: the record was begun with another one.
    """
    identity = await survey(client, server, about.get(server.role, {}))
    noted = record.notes.get(f"identity/{server.role}")
    if noted and (differs := changed(Identity(**noted), identity)):
        raise ConfigurationError(
            f"{record.directory} was begun with another {server.role}: {', '.join(differs)}",
            hint="answers of two servers give no verdict: begin anew in another directory",
        )
    record.note(f"identity/{server.role}", identity.to_dict())
    return Asking(client, identity.model, record, progress)


def mismatches(record: Record) -> list[str]:
    """Why candidate and baseline cannot be compared, by what they said of themselves."""
    identities = [record.notes.get(f"identity/{role}") for role in ("candidate", "baseline")]
    if None in identities:
        return []
    ours, theirs = (Identity(**identity) for identity in identities if identity)
    return differences(ours, theirs)


async def _prepare(
    record: Record,
    tier: Tier,
    prompts: Sequence[Prompt],
    candidate: Asking | None,
    baseline: Asking | None,
) -> int:
    """Make token ids of the prompts; the number of tokens to generate for each.

    The baseline's tokenizer makes them, and the candidate's must make the same.
    """
    contexts = [
        note["context"]
        for key, note in record.notes.items()
        if key.startswith("identity/") and note["context"]
    ]
    context = min(contexts, default=1 << 30)
    # One token more is generated when an answer is scored, and doubling one adds one.
    tokens = min(tier.tokens, context // 2 - 1)
    if tokens < 1:
        raise Inconclusive(
            f"a context of {context} tokens has no room for a prompt and its answer",
            hint="serve with a larger --max-model-len",
        )
    room = context - tokens - 2
    main = baseline or candidate
    if main is None:
        return tokens
    other = candidate if main is baseline else None
    if record.notes.get("tokenizer", {}).get("by") == main.client.role:
        return tokens
    compared = 0
    made: dict[str, tuple[int, ...]] = {}
    differing: list[str] = []

    async def ids_of(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        if prompt.ids:
            return prompt.ids, None
        asked = prompt.text or prompt.messages
        ids = await main.client.tokenize(main.model, asked)
        if ids is None and prompt.messages:
            asked = "\n\n".join(f"{role}: {content}" for role, content in prompt.messages)
            ids = await main.client.tokenize(main.model, asked)
        if ids is None:
            raise ConfigurationError(
                f"the {main.client.role} at {main.client.url} has no tokenizer",
                hint='give prompts as token ids: --prompts FILE with lines of {"token_ids": [...]}',
            )
        return ids, await other.client.tokenize(other.model, asked) if other else None

    def done(prompt: Prompt, both: tuple[tuple[int, ...], tuple[int, ...] | None]) -> None:
        nonlocal compared
        ids, theirs = both
        made[prompt.key] = ids[: min(prompt.length or room, room)]
        if prompt.key in record.prompts:
            # Made by the other's tokenizer before, and cut as its context allowed.
            theirs = record.prompts[prompt.key][1]
            ids = ids[: len(theirs)]
        if theirs is not None:
            compared += 1
            if theirs != ids:
                differing.append(prompt.key)

    await for_each(prompts, ids_of, done, main.client.concurrency)
    for prompt in prompts:  # in their order
        ids = made[prompt.key]
        if prompt.key not in record.prompts and (prompt.ids or len(ids) >= SHORTEST_PROMPT):
            record.add_prompt(prompt.key, prompt.kind, ids)
    record.note(
        "tokenizer",
        {"by": main.client.role, "compared": compared, "differs": differing[:10]},
    )
    return tokens


async def _candidate(
    record: Record, tier: Tier, ours: Asking, tokens: int, *, sampled: bool = True
) -> None:
    keys = list(record.prompts)
    before = await ours.client.acceptance()
    await ours.answer("candidate", keys, tokens)
    _keep_acceptance(record, "candidate", before, await ours.client.acceptance())
    if sampled:
        await ours.answer("sampled", keys[: tier.sampled], tokens, temperature=1.0)
    record.note("asked", {"tokens": tokens})


async def _null(record: Record, tier: Tier, theirs: Asking, tokens: int) -> None:
    """The baseline's own answers to the same prompts, and some with nothing else running."""
    keys = list(record.answers.get("candidate", {}))
    before = await theirs.client.acceptance()
    await theirs.answer("null", keys, tokens)
    _keep_acceptance(record, "baseline", before, await theirs.client.acceptance())
    await theirs.answer("alone", keys[: tier.alone], tokens, concurrency=1)


async def _scores(record: Record, tier: Tier, scorer: Asking) -> None:
    """All scores, outliers once more, and the positive control."""
    for stage in ("candidate", "null", "alone"):
        await scorer.score(stage, _emitted(record, stage))
    await scorer.score_sampled()
    above, _ = measure.threshold(record.scores["null"], list(record.prompts))
    enough = confirmed_requests(record, above)
    for stage in ("candidate", "null"):
        emitted = _emitted(record, stage)
        again = {key: emitted[key] for key in suspects(record, stage, above)[:enough]}
        await scorer.score(f"confirm/{stage}", again, alone=True)
    if not tier.controlled:
        return
    for stage, damaged in controls(record).items():
        await scorer.score(stage, {n: (d.key, d.tokens) for n, d in damaged.items()})


def suspects(record: Record, stage: str, above: float) -> list[str]:
    """Prompts to whose answers the judge objects."""
    return [
        key
        for key, scores in record.scores.get(stage, {}).items()
        if any(gap > above for gap in scores.gap)
    ]


def confirmed_requests(record: Record, above: float) -> int:
    """How many of them are scored again: twice as many as make a FAIL.

    Only what is confirmed counts towards one, and where many tokens are asked for, many outliers
    are tolerated.
    """
    scores = record.scores["candidate"].values()
    tokens = sum(len(one.gap) for one in scores)
    if not tokens:
        return CONFIRMED_REQUESTS
    by_chance = len(suspects(record, "null", above))
    fewest = fewest_that_fail(by_chance, len(scores), tokens / len(scores))
    return max(CONFIRMED_REQUESTS, 2 * fewest)


def controls(record: Record) -> dict[str, dict[str, Damaged]]:
    """Stage -> damaged answers of the baseline, or of the candidate where there is none.

    The same record always gives the same.
    """
    sound = record.answers.get("null") or record.answers.get("candidate", {})
    answers = {key: answer.tokens for key, answer in sound.items()}
    tokens = sum(map(len, answers.values()))
    many = max(FEWEST, min(MOST, tokens // 100))
    return {
        "control/0.001": damage(answers, FEWEST, seed=1),
        "control/0.01": damage(answers, many, seed=2),
        "ruin": ruin(answers, RUINED_REQUESTS),
    }


async def _directions(record: Record, ours: Asking) -> None:
    """The candidate's opinion, where the baseline objects to its answers."""
    keys = affected(record)[:DIRECTED_REQUESTS]
    for stage, answers in (("self", "candidate"), ("reverse", "null")):
        emitted = _emitted(record, answers)
        await ours.score(stage, {key: emitted[key] for key in keys if key in emitted})


async def _formats(record: Record, servers: Sequence[Asking]) -> None:
    """In which number format each computes: rounding of another makes outliers, too."""
    emitted = _emitted(record, "candidate")
    answers = [emitted[key] for key in affected(record) if key in emitted]
    if answers:
        for server in servers:
            await _format(record, server, answers)


async def _format(
    record: Record, server: Asking, answers: Sequence[tuple[str, Sequence[int]]]
) -> None:
    """Keep the number format of one server, by what it thinks of the first few answers."""
    gaps: list[float] = []
    for key, tokens in answers[:FORMAT_REQUESTS]:
        ids = record.prompts[key][1]
        _, likeliest = await server.client.likeliest(
            server.model, [*ids, *tokens], len(ids), LIKELIEST
        )
        gaps += gaps_of(likeliest)
    record.note(f"format/{server.client.role}", {"format": format_of(gaps)})


def affected(record: Record) -> list[str]:
    """Prompts to whose answers of the candidate the baseline objects, in order."""
    above, _ = measure.threshold(record.scores.get("null", {}), list(record.prompts))
    return [
        key
        for key in record.prompts
        if key in record.scores.get("candidate", {})
        and any(gap > above for gap in record.scores["candidate"][key].gap)
    ]


@dataclass(frozen=True, slots=True)
class Worst:
    """A token that the baseline would not have emitted.

    Attributes:
        position: in the answer, from 0.
        gap: nats.
        before, token, wanted: texts, or ids where the server has no tokenizer.
    """

    key: str
    position: int
    gap: float
    before: str
    token: str
    wanted: str


def _objections(record: Record) -> Iterator[Objection]:
    """Tokens of the candidate's answers that the baseline would not have emitted."""
    for key, scores in record.scores.get("candidate", {}).items():
        for position, gap in enumerate(scores.gap):
            if gap > HARD_GAP:
                yield gap, key, position, scores.best[position]


def _partings(record: Record, baseline: Record) -> Iterator[Objection]:
    """The same by a stored baseline: the first token that is another than the baseline's."""
    for key, answer in record.answers["candidate"].items():
        stored = baseline.answers["null"][key].tokens
        parting = compare(answer.tokens, stored, baseline.likeliest.get(key, NOT_SCORED))
        if parting.gap > HARD_GAP:
            yield parting.gap, key, parting.position, stored[parting.position]


async def _context(record: Record, server: Asking, objections: Iterable[Objection]) -> None:
    """The worst tokens, as text; of each answer one at most."""
    worst: list[dict[str, Any]] = []
    keys = set[str]()
    for gap, key, position, wanted in sorted(objections, key=lambda one: (-one[0], *one[1:])):
        if key in keys or len(worst) == _WORST:
            continue
        keys.add(key)
        tokens = record.answers["candidate"][key].tokens
        before = [*record.prompts[key][1], *tokens[:position]][-_CONTEXT:]
        texts = [
            await server.client.detokenize(server.model, ids) or " ".join(map(str, ids))
            for ids in (before, [tokens[position]], [wanted])
        ]
        worst.append(asdict(Worst(key, position, gap, *texts)))
    record.note("worst", {"tokens": worst})


def _rest(token: int, rank: int, position: Mapping[int, float]) -> float:
    """The probability of all tokens that are none of the likeliest at a position."""
    likeliest = (
        logprob for other, logprob in position.items() if other != token or rank <= LIKELIEST
    )
    return max(0.0, 1 - sum(map(math.exp, likeliest)))


def _emitted(record: Record, stage: str) -> dict[str, tuple[str, Sequence[int]]]:
    """Answers with at least one token; there is nothing to score in the others."""
    return {
        key: (key, answer.tokens)
        for key, answer in record.answers.get(stage, {}).items()
        if answer.tokens
    }


async def _known_answers(record: Record, ours: Asking) -> None:
    """How many texts that every model knows the candidate goes on with as expected."""
    went_on: list[bool] = []

    async def ask(known: KnownAnswer) -> bool | None:
        ids = await ours.client.tokenize(ours.model, known.text)
        if ids is None:
            return None
        answer = await ours.client.generate(ours.model, ids, KNOWN_TOKENS)
        text = await ours.client.detokenize(ours.model, answer.tokens) or ""
        return " ".join(text.split()).startswith(known.answer.strip())

    def done(_: KnownAnswer, right: bool | None) -> None:
        if right is not None:
            went_on.append(right)

    await for_each(KNOWN_ANSWERS, ask, done, ours.client.concurrency)
    record.note("known", {"asked": len(went_on), "right": sum(went_on)})


def _keep_acceptance(
    record: Record, role: str, before: Acceptance | None, after: Acceptance | None
) -> None:
    """Add what was accepted meanwhile to what an interrupted run had kept."""
    if before is None or after is None or after.drafts < before.drafts:
        return
    kept = acceptance(record, role) or Acceptance(0, ())
    positions = max(len(after.accepted), len(kept.accepted))
    accepted = [
        _at(kept.accepted, i) + _at(after.accepted, i) - _at(before.accepted, i)
        for i in range(positions)
    ]
    drafts = kept.drafts + after.drafts - before.drafts
    record.note(f"acceptance/{role}", {"drafts": drafts, "accepted": accepted})


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0


def acceptance(record: Record, role: str) -> Acceptance | None:
    """Speculative decoding's counters over the greedy answers of a server."""
    note = record.notes.get(f"acceptance/{role}")
    return Acceptance(note["drafts"], tuple(note["accepted"])) if note else None
