"""From a record to the evidence that is judged. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import replace

from mtppp.engine.bulk import Answer, Scores
from mtppp.verify import measure
from mtppp.verify.control import Damaged
from mtppp.verify.formats import format_of, gaps_of
from mtppp.verify.measure import SPOTLESS, Judged, Pair
from mtppp.verify.record import Record
from mtppp.verify.run import LIKELIEST, acceptance, affected, controls, mismatches
from mtppp.verify.sampled import Draw, sampled_p, sampled_power
from mtppp.verify.stored import control_scores, forced_pairs, free_pairs
from mtppp.verify.tiers import ALPHA, HARD_GAP, RUINED, TESTS, Tier
from mtppp.verify.verdict import (
    Control,
    Direction,
    Directions,
    Evidence,
    Sampled,
    p_of_tokens,
)

_RATES = {"control/0.001": 0.001, "control/0.01": 0.01}
DAMAGED = 0.01
"""Share of tokens whose damage must be FAIL, or nothing is a PASS."""


def evidence_of(record: Record, tier: Tier, *, same_model: bool = False) -> Evidence:
    """What a finished record says."""
    above, halved = measure.threshold(record.scores.get("null", {}), list(record.prompts))
    pairs = pairs_of(record, above)
    fixed = None
    if halved:
        # Nothing chose 1 nat, so that all may be judged by it: half would be too few requests.
        fixed = pairs_of(record, HARD_GAP)
        # The threshold was chosen with the first half; only the second knows nothing of it.
        pairs = _second_half(pairs, record)
    return Evidence(
        tier=tier,
        pairs=pairs,
        above=above,
        fixed=fixed,
        control=_control(record, pairs, above),
        alone=_direction(record.scores.get("alone", {}), above),
        sampled=_sampled(record, tier),
        directions=_directions(record, above),
        drafted=acceptance(record, "candidate"),
        reference=acceptance(record, "baseline"),
        itself=not record.answers.get("null"),
        known=_known(record),
        formats=tuple(
            record.notes.get(f"format/{role}", {}).get("format", "")
            for role in ("candidate", "baseline")
        ),
        reasons=tuple(_reasons(record, same_model=same_model)),
    )


def _second_half(pairs: list[Pair], record: Record) -> list[Pair]:
    """Those of the prompts that have no say in the threshold."""
    others = set(list(record.prompts)[1::2])
    return [pair for pair in pairs if pair.key in others]


def evidence_by_stored(
    record: Record, stored: Record, tier: Tier, *, same_model: bool = False
) -> Evidence:
    """What a finished record says beside a stored baseline."""
    above, halved = measure.threshold(stored.scores["null"], list(stored.prompts))
    asked = stored.notes["asked"]["tokens"]
    pairs, forced = free_pairs(record, stored, above, asked), forced_pairs(record, stored, above)
    fixed = None
    if halved:  # as in `evidence_of`
        fixed = free_pairs(record, stored, HARD_GAP, asked)
        pairs, forced = _second_half(pairs, stored), _second_half(forced, stored)
    damaged = controls(stored)
    scores = {
        stage: {name: control_scores(one, stored) for name, one in damaged[stage].items()}
        for stage in _RATES
    }
    return Evidence(
        tier=tier,
        pairs=pairs,
        above=above,
        control=_control_of(damaged, scores, pairs, above, []),
        alone=Direction(0, 0),
        fixed=fixed,
        forced=forced,
        drafted=acceptance(record, "candidate"),
        reference=acceptance(stored, "baseline"),
        formats=(
            record.notes.get("format/candidate", {}).get("format", ""),
            format_of(gap for one in stored.likeliest.values() for gap in gaps_of(one)),
        ),
        reasons=tuple(_reasons(record, same_model=same_model)),
    )


def _reasons(record: Record, *, same_model: bool) -> list[str]:
    reasons = [] if same_model else mismatches(record)
    differing = record.notes.get("tokenizer", {}).get("differs", [])
    if differing:
        reasons.append(
            f"another tokenizer: the candidate makes other ids of {len(differing)} prompts or"
            f" more, {differing[0]} for instance"
        )
    return reasons


def pairs_of(record: Record, above: float) -> list[Pair]:
    """Candidate and baseline, prompt by prompt; answers without a token count as such."""
    asked = record.notes.get("asked", {}).get("tokens", 0)
    ours, theirs = record.answers.get("candidate", {}), record.answers.get("null", {})
    sampled = record.answers.get("sampled", {})
    alone = not theirs  # the candidate judged itself: nothing is to be expected of a baseline
    ends = measure.ends_of(theirs.values())

    def judged(stage: str, key: str, answer: Answer) -> Judged:
        return measure.judge_answer(
            answer,
            record.scores.get(stage, {}).get(key) or _nothing(),
            record.scores.get(f"confirm/{stage}", {}).get(key),
            above=above,
            asked=asked,
            ends=ends,
        )

    def candidate(key: str) -> Judged:
        """With what is damage to the ends of its sampled answer: chance has no part in it."""
        found = judged("candidate", key, ours[key])
        if key not in sampled:
            return found
        flags = measure.flags_of(sampled[key], asked=asked, ends=ends) & measure.DAMAGE
        return replace(found, flags=found.flags | flags)

    return [
        Pair(
            key,
            kind,
            candidate(key),
            SPOTLESS if alone else judged("null", key, theirs[key]),
        )
        for key, (kind, _) in record.prompts.items()
        if key in ours and (alone or key in theirs)
    ]


def _nothing() -> Scores:
    return Scores(array("d"), array("l"), array("l"), array("d"))


def _control(record: Record, pairs: list[Pair], above: float) -> Control | None:
    if not all(record.scores.get(stage) for stage in _RATES):
        return None
    ruined = [
        sum(gap > above for gap in scores.gap) >= RUINED
        for scores in record.scores.get("ruin", {}).values()
    ]
    return _control_of(controls(record), record.scores, pairs, above, ruined)


def _control_of(
    damaged: Mapping[str, Mapping[str, Damaged]],
    scores: Mapping[str, Mapping[str, Scores]],
    pairs: list[Pair],
    above: float,
    ruined: list[bool],
) -> Control:
    hits = {
        stage: {
            name: measure.seen(one, scores[stage][name], above)
            for name, one in damaged[stage].items()
            if name in scores[stage]
        }
        for stage in _RATES
    }
    control = Control(
        made={_RATES[stage]: len(found) for stage, found in hits.items()},
        seen={_RATES[stage]: sum(found.values()) for stage, found in hits.items()},
        fails=False,
        ruined_made=len(ruined),
        ruined_seen=sum(ruined),
    )
    return replace(control, fails=would_fail(pairs, DAMAGED * control.sensitivity))


def would_fail(pairs: list[Pair], rate: float) -> bool:
    """Whether sound answers with so many outliers more for each token would be FAIL.

    As many prompts are touched as are expected to be; which ones makes no difference.
    """
    touched = int(sum(1 - (1 - rate) ** pair.candidate.tokens for pair in pairs))
    as_if = [_as_if(pair, index < touched) for index, pair in enumerate(pairs)]
    return p_of_tokens(as_if) < ALPHA / TESTS


def _as_if(pair: Pair, damaged: bool) -> Pair:
    """The pair, were the candidate's answer a sound one, damaged or not."""
    outliers = tuple(range(pair.expected + damaged))
    as_candidate = replace(pair.null, tokens=pair.candidate.tokens, confirmed=outliers)
    return replace(pair, candidate=as_candidate)


def _direction(scores: dict[str, Scores], above: float) -> Direction:
    return Direction(
        sum(len(one.gap) for one in scores.values()),
        sum(gap > above for one in scores.values() for gap in one.gap),
    )


def _directions(record: Record, above: float) -> Directions | None:
    keys = set(affected(record)) & set(record.scores.get("self", {}))
    if not keys:
        return Directions(*[Direction(0, 0)] * 4) if record.scores.get("candidate") else None
    base_cand, cand_cand, cand_base, base_base = (
        _direction({k: s for k, s in record.scores.get(stage, {}).items() if k in keys}, above)
        for stage in ("candidate", "self", "reverse", "null")
    )
    return Directions(base_cand, cand_cand, cand_base, base_base)


def _known(record: Record) -> tuple[int, int] | None:
    note = record.notes.get("known")
    return (note["right"], note["asked"]) if note else None


def _sampled(record: Record, tier: Tier) -> Sampled | None:
    answers, scores = record.answers.get("sampled", {}), record.scores.get("sampled", {})
    draws = [
        Draw(token == best, rank > LIKELIEST, math.exp(min(0.0, logprob + gap)), rest)
        for key, one in scores.items()
        for token, best, rank, gap, logprob, rest in zip(
            answers[key].tokens,
            one.best,
            one.rank,
            one.gap,
            one.logprob,
            record.rest[key],
            strict=True,
        )
    ]
    if not draws:
        return None
    alpha, margin = ALPHA / TESTS, tier.token_margin
    power = {
        share: sampled_power(draws, margin, replaced=share, alpha=alpha) for share in (0.05, 0.01)
    }
    return Sampled(len(draws), sampled_p(draws, margin), power)
