"""From counts to a verdict. Pure: the same evidence always gives the same verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtppp.engine.client import Acceptance
from mtppp.verify.measure import Judged, Pair
from mtppp.verify.power import Design, Power
from mtppp.verify.statistics import (
    at_least_p,
    binomial_lower,
    binomial_upper,
    bootstrap_upper,
    sign_flip_p,
)
from mtppp.verify.tiers import ALPHA, CLIP, TESTS, TOLERATED, Tier

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]

EXIT_STATUS: Mapping[Outcome, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}

FEWEST_CONTROLS = 50
ACCEPTANCE_MARGIN = 0.05
"""Share of a position's acceptance that may be missing."""

BLIND = (
    "this sees faults of decoding and of speculation; it cannot see a wrong forward pass, wrong"
    " weights or a wrong stage boundary, for the candidate believes in them"
)

HOPELESS = 0.1
"""Acceptance of first drafts below which a drafter is called broken without anything to compare."""

PARTLY = (
    "by a stored baseline: answers are judged as far as they are the same as its own, and at the"
    " first token that is not"
)

_BAD, _FINE = 0.5, 0.1  # shares of the main direction's outliers


@dataclass(frozen=True, slots=True)
class Control:
    """What became of damage done on purpose.

    Attributes:
        made, seen: damaged tokens, and those that were outliers; by the share of tokens that the
            damage stands for.
        fails: whether a run with 1 % of its tokens so damaged would be FAIL by the same test.
        ruined_made, ruined_seen: answers of other requests.
    """

    made: Mapping[float, int]
    seen: Mapping[float, int]
    fails: bool
    ruined_made: int
    ruined_seen: int

    @property
    def sensitivity(self) -> float:
        """Share of damaged tokens that are outliers; at least so, with confidence 1 - ALPHA / 2.

        The other half of ALPHA is for the rate that is divided by it.
        """
        return binomial_lower(sum(self.seen.values()), sum(self.made.values()), ALPHA / 2)


@dataclass(frozen=True, slots=True)
class Direction:
    """Outliers when one scores the other's answers, on the prompts where the candidate has some."""

    tokens: int
    outliers: int

    @property
    def rate(self) -> float:
        return self.outliers / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Directions:
    """X->Y: X scores Y's answers."""

    base_cand: Direction
    cand_cand: Direction
    cand_base: Direction
    base_base: Direction


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens at temperature 1.

    Attributes:
        p: P(as much against the baseline's probabilities).
        power: share of tokens replaced at random -> chance of FAIL.
    """

    tokens: int
    p: float
    power: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a verdict rests on.

    Attributes:
        pairs: greedy answers to the same prompts.
        fixed: all of them by a threshold of 1 nat, for the bound of ruined requests, where `above`
            is another and `pairs` are half of them.
        alone: tokens and outliers of the baseline's answers with nothing else running.
        reasons: against any verdict, found before: the two do not match, say.
        advice: what to do about them.
        drafted, reference: counters of speculative decoding of the candidate and of the baseline
            over these requests; None when not known.
        itself: the candidate scored its own answers, for want of a baseline.
        forced: of a stored baseline's answers, what the candidate thinks of each token against what
            the baseline does; `pairs` then reach as far as the candidate's answers are the same.
        formats: number formats of candidate and baseline; "" where that is not known.
        known: texts that any model knows, gone on with as expected, and asked.
    """

    tier: Tier
    pairs: Sequence[Pair]
    above: float
    control: Control | None
    alone: Direction
    sampled: Sampled | None = None
    directions: Directions | None = None
    drafted: Acceptance | None = None
    reference: Acceptance | None = None
    reasons: Sequence[str] = ()
    advice: str = "compare two servers of the same model, then run again"
    itself: bool = False
    fixed: Sequence[Pair] | None = None
    forced: Sequence[Pair] | None = None
    known: tuple[int, int] | None = None
    formats: tuple[str, ...] = ("", "")

    @property
    def formats_differ(self) -> bool:
        """Whether candidate and baseline were seen to compute in different number formats."""
        ours, theirs = self.formats
        return bool(ours and theirs) and ours != theirs


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a verdict; rates are per token or per request.

    Attributes:
        p_tokens, p_requests, p_sampled: of the three tests; p_forced takes the place of the last
            where the baseline is a stored one.
        bounded, may_be_ruined: requests that `request_bound` is of, and those of them that are
            ruined, or would be if each outlier that was not scored again persisted.
        token_bound: share of damaged tokens that the run excludes, if spread over requests.
        request_bound: share of ruined requests that it excludes.
    """

    requests: int
    tokens: int
    outliers: int
    confirmed: int
    null_tokens: int
    null_outliers: int
    affected: int
    ruined: int
    null_ruined: int
    mean_gap: float
    null_mean_gap: float
    p_tokens: float
    p_requests: float
    p_sampled: float
    p_forced: float
    p_gap: float
    forced_tokens: int
    forced_outliers: int
    bounded: int
    may_be_ruined: int
    token_bound: float
    request_bound: float
    sensitivity: float


@dataclass(frozen=True, slots=True)
class AcceptanceVerdict:
    """How well drafts are accepted, a verdict of its own.

    Attributes:
        outcome: "AS REFERENCE", "LOW", "NOT JUDGED".
        rates: accepted per draft at each position; reference: the same of the baseline, if known.
    """

    outcome: str
    why: str
    rates: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said.

    Attributes:
        why: what decided, most important first.
        judged: whether there was something to judge; False where the servers cannot be compared.
        cause: where the fault is; "" when not known or none.
        token_power, request_power: share of damaged tokens, or of ruined requests -> chances.
        sampled_power: share of sampled tokens that are replaced -> chance of FAIL.
        warnings: what does not change the verdict.
        next_steps: what to do.
    """

    outcome: Outcome
    why: tuple[str, ...]
    figures: Figures
    acceptance: AcceptanceVerdict
    cause: str = ""
    sampled_power: Mapping[float, float] = field(default_factory=dict)
    token_power: Mapping[float, Power] = field(default_factory=dict)
    request_power: Mapping[float, Power] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    judged: bool = True

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        cause = f", {self.cause}" if self.cause else ""
        doubt = ", with a warning" if self.outcome == "PASS" and self.warnings else ""
        return f"{self.outcome}{cause}{doubt}"

    @property
    def passed(self) -> bool | None:
        """None when it is INCONCLUSIVE."""
        return {"PASS": True, "FAIL": False}.get(self.outcome)

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.outcome]


def judge(evidence: Evidence) -> Verdict:
    """FAIL when a test says so, PASS when every bound is below its margin, else INCONCLUSIVE."""
    figures = measure(evidence)
    acceptance = judge_acceptance(evidence.drafted, evidence.reference)
    if evidence.reasons:
        return Verdict(
            "INCONCLUSIVE",
            tuple(evidence.reasons),
            figures,
            acceptance,
            next_steps=(evidence.advice,),
            judged=False,
        )
    outcome, why, steps = decide(evidence, figures)
    cause, because = _cause(evidence, figures) if outcome == "FAIL" else ("", "")
    design = Design(
        evidence.tier,
        figures.requests,
        figures.tokens,
        figures.null_outliers / figures.null_tokens if figures.null_tokens else 0.0,
        figures.sensitivity,
    )
    powers = bool(figures.tokens) and figures.sensitivity > 0
    return Verdict(
        outcome,
        (*why, *([because] if because else [])),
        figures,
        acceptance,
        cause=cause,
        sampled_power=dict(evidence.sampled.power) if evidence.sampled else {},
        token_power={s: design.of_tokens(s) for s in (0.01, 0.001)} if powers else {},
        request_power={
            s: design.of_requests(s, figures.bounded, stored=evidence.forced is not None)
            for s in (0.05, 0.01)
        }
        if powers
        else {},
        warnings=tuple(_warnings(outcome, evidence, figures, acceptance)),
        next_steps=(*steps, *_steps(cause, acceptance, evidence.drafted)),
    )


def measure(evidence: Evidence) -> Figures:
    """The numbers, all from the pairs."""
    pairs = evidence.pairs
    tokens = sum(pair.candidate.tokens for pair in pairs)
    null_tokens = sum(pair.null.tokens for pair in pairs)
    outliers = sum(len(pair.candidate.outliers) for pair in pairs)
    ruined = sum(pair.ruined for pair in pairs)
    sensitivity = evidence.control.sensitivity if evidence.control else 0.0
    forced = evidence.forced or ()
    gaps = forced or pairs
    forced_tokens = sum(pair.candidate.tokens for pair in forced)
    forced_outliers = sum(len(pair.candidate.outliers) for pair in forced)
    fixed = pairs if evidence.fixed is None else evidence.fixed
    may_be_ruined = sum(pair.may_be_ruined for pair in fixed)
    seen_rate = _bound(pairs)
    if evidence.forced is not None:
        seen_rate = max(seen_rate, _bound(forced))
    return Figures(
        requests=len(pairs),
        tokens=tokens,
        outliers=outliers,
        confirmed=sum(pair.confirmed for pair in pairs),
        null_tokens=null_tokens,
        null_outliers=sum(len(pair.null.outliers) for pair in pairs),
        affected=sum(pair.confirmed > 0 for pair in pairs),
        ruined=ruined,
        null_ruined=sum(pair.null_ruined for pair in pairs),
        mean_gap=_mean_gap([pair.candidate for pair in gaps]),
        null_mean_gap=_mean_gap([pair.null for pair in gaps]),
        p_tokens=p_of_tokens(pairs),
        p_requests=sign_flip_p([pair.ruined - pair.null_ruined for pair in pairs]),
        p_sampled=evidence.sampled.p if evidence.sampled else 1.0,
        p_forced=p_of_tokens(forced),
        p_gap=_p_of_gap(gaps),
        forced_tokens=forced_tokens,
        forced_outliers=forced_outliers,
        token_bound=min(1.0, seen_rate / sensitivity) if sensitivity else 1.0,
        bounded=len(fixed),
        may_be_ruined=may_be_ruined,
        request_bound=binomial_upper(may_be_ruined, len(fixed), ALPHA),
        sensitivity=sensitivity,
    )


def _bound(pairs: Sequence[Pair]) -> float:
    """The rate of outliers that is not exceeded: exact, and by drawing prompts anew."""
    tokens = sum(pair.candidate.tokens for pair in pairs)
    outliers = [len(pair.candidate.outliers) for pair in pairs]
    half = ALPHA / 2  # the rest is for the sensitivity
    return max(binomial_upper(sum(outliers), tokens, half), bootstrap_upper(outliers, tokens, half))


def p_of_tokens(pairs: Sequence[Pair]) -> float:
    """P of the excess of outliers over the baseline's own, and over what is tolerated anyway."""
    excess = sign_flip_p([min(CLIP, pair.confirmed) - min(CLIP, pair.expected) for pair in pairs])
    tolerated = (1 - (1 - TOLERATED) ** pair.candidate.tokens for pair in pairs)
    return max(excess, at_least_p(tolerated, sum(pair.confirmed > 0 for pair in pairs)))


def _mean_gap(answers: Sequence[Judged]) -> float:
    tokens = sum(answer.tokens for answer in answers)
    return sum(answer.gap for answer in answers) / tokens if tokens else 0.0


def _p_of_gap(pairs: Sequence[Pair]) -> float:
    """Of the prompts with a larger mean gap: a warning's, since layouts may differ a little."""
    signs = [
        (c > n) - (c < n)
        for pair in pairs
        if pair.candidate.tokens and pair.null.tokens
        for c, n in [(pair.candidate.gap / pair.candidate.tokens, pair.null.gap / pair.null.tokens)]
    ]
    return sign_flip_p(signs)


def decide(evidence: Evidence, figures: Figures) -> tuple[Outcome, list[str], list[str]]:
    """The verdict, why, and what to do about it."""
    alpha = ALPHA / TESTS
    judging = "the candidate itself" if evidence.itself else "the baseline"
    failed = []
    if figures.p_tokens < alpha:
        again = (
            f"; {figures.confirmed} of them, in {figures.affected} requests, are so again when"
            " scored alone"
        )
        failed.append(
            f"{figures.outliers} of {figures.tokens} tokens are none that {judging} would have"
            f" emitted{again if evidence.forced is None else ''} (p = {figures.p_tokens:.1g})"
        )
    if figures.p_requests < alpha:
        failed.append(
            f"{figures.ruined} of {figures.requests} requests are ruined"
            f" (p = {figures.p_requests:.1g})"
        )
    if figures.p_sampled < alpha and evidence.sampled:
        failed.append(
            f"{evidence.sampled.tokens} tokens at temperature 1 do not follow the probabilities of"
            f" {judging} (p = {figures.p_sampled:.1g})"
        )
    if figures.p_forced < alpha:
        failed.append(
            f"to {figures.forced_outliers} of {figures.forced_tokens} tokens of the baseline's"
            f" answers the candidate objects (p = {figures.p_forced:.1g})"
        )
    noise = _noise(evidence, figures)
    if noise:
        return "INCONCLUSIVE", [noise], ["restart the baseline, or take another one"]
    if failed and evidence.formats_differ:
        ours, theirs = evidence.formats
        return (
            "INCONCLUSIVE",
            [
                f"the candidate computes in {ours}, the baseline in {theirs}: what the baseline"
                " objects to may be rounding, of which its own answers show nothing",
                *failed,
            ],
            ["take a baseline in the candidate's number format (--dtype)"],
        )
    if failed:
        return "FAIL", failed, []
    return _pass_or_not(evidence, figures)


def _noise(evidence: Evidence, figures: Figures) -> str:
    """Why the baseline itself is not to be trusted; "" when it is."""
    limit = 10 * max(TOLERATED, evidence.tier.token_margin)
    null = Direction(figures.null_tokens, figures.null_outliers)
    for what, direction in (("its own answers", null), ("its answers one by one", evidence.alone)):
        if direction.outliers >= 3 and direction.rate > limit:
            return (
                f"the baseline disagrees with {what}: {direction.outliers} outliers in"
                f" {direction.tokens} tokens"
            )
    return ""


def _pass_or_not(evidence: Evidence, figures: Figures) -> tuple[Outcome, list[str], list[str]]:
    tier, control = evidence.tier, evidence.control
    why, steps = [], []
    if control is None or sum(control.made.values()) < 2 * FEWEST_CONTROLS:
        why.append("too few tokens for the positive control: nothing says that damage is seen")
        steps.append("give prompts with longer answers, or more of them")
    elif not control.fails:
        why.append(
            f"were 1 % of the tokens damaged, this run would hardly be FAIL: of"
            f" {sum(control.made.values())} that were on purpose {sum(control.seen.values())} were"
            f" seen, and it has {figures.tokens} in {figures.requests} answers"
        )
        steps.append("give more prompts, or such as the model answers with more certainty")
    elif evidence.forced is None and not control.ruined_made:
        why.append("no answer is long enough to be ruined on purpose: nothing says that it is seen")
        steps.append("give prompts with longer answers")
    elif control.ruined_seen < 0.9 * control.ruined_made:
        why.append(
            f"the positive control was missed: of {control.ruined_made} requests that were ruined"
            f" on purpose {control.ruined_seen} were seen"
        )
        steps.append("take prompts that the model answers with more certainty")
    if figures.token_bound >= tier.token_margin:
        why.append(
            f"up to {percent(figures.token_bound)} of tokens may be damaged; PASS needs less"
            f" than {percent(tier.token_margin)} ({figures.outliers} outliers in {figures.tokens}"
            " tokens)"
        )
        steps.append(_more_of(figures.outliers, tier))
    if figures.request_bound >= tier.request_margin:
        why.append(
            f"up to {percent(figures.request_bound, 1)} of requests may be ruined; PASS needs"
            f" less than {percent(tier.request_margin, 1)} ({figures.may_be_ruined} may"
            f" be of {figures.bounded})"
        )
        if not figures.may_be_ruined:
            needed = math.ceil(math.log(ALPHA) / math.log1p(-tier.request_margin))
            steps.append(f"give at least {needed} prompts")
        else:
            steps.append(_more_of(figures.may_be_ruined, tier))
    if evidence.known and 2 * evidence.known[0] < evidence.known[1]:
        why.append(
            f"only {evidence.known[0]} of {evidence.known[1]} texts that any model knows went on as"
            " they should: the forward pass is wrong, or the model knows little"
        )
        steps.append("compare with a baseline: --baseline-url")
    if why:
        return "INCONCLUSIVE", why, list(dict.fromkeys(steps))
    passed = (
        f"less than {percent(figures.token_bound)} of all tokens are damaged if damage is spread"
        f" over requests, and less than {percent(figures.request_bound, 1)} of all requests are"
        f" ruined (each with confidence {percent(1 - ALPHA, 1)})"
    )
    if not evidence.itself:
        return "PASS", [passed, *([PARTLY] if evidence.forced is not None else [])], []
    return (
        "PASS",
        [f"by its own judgement {passed}", BLIND],
        ["compare with a baseline to see the rest: --baseline-url"],
    )


def _more_of(found: int, tier: Tier) -> str:
    if not found:
        return "more tokens are needed: longer answers, or a larger tier"
    larger = "certify" if tier.name == "smoke" else "soak"
    return f"look at the outliers below, and run --tier {larger}: it tells few from none"


def _cause(evidence: Evidence, figures: Figures) -> tuple[str, str]:
    """Which part is at fault, and why it is thought so."""
    alpha = ALPHA / TESTS
    if evidence.forced is not None and figures.p_forced < alpha:
        return "weights or forward pass", "given the baseline's answers it prefers other tokens"
    if not figures.outliers and figures.p_requests < alpha:
        return (
            "ends of answers",
            "answers are empty, cut off, too long or go on after their end; no token that is there"
            " is one that the baseline would not have emitted",
        )
    if not figures.outliers and figures.p_sampled < alpha:
        return "sampling", "greedy answers are right, those at temperature 1 are not"
    return _cause_of_outliers(evidence)


def _cause_of_outliers(evidence: Evidence) -> tuple[str, str]:
    d = evidence.directions
    if evidence.forced is not None:
        return "decode or speculation", "given the baseline's answers it agrees with them"
    if evidence.itself:
        return (
            "decode or speculation",
            "the candidate's own forward pass objects to its answers, more often than to 1 token in"
            f" {1 / TOLERATED:,.0f}: that much is taken for rounding, for nothing shows it",
        )
    if d is None:
        return "", "the candidate was not asked to score, so the cause is not known"
    if not d.base_cand.outliers:
        return "", "no answer with outliers was scored by the candidate: the cause is not known"
    itself = d.cand_cand.rate / d.base_cand.rate
    of_base = max(0.0, d.cand_base.rate - d.base_base.rate) / d.base_cand.rate
    shares = (
        "of the baseline's objections to these answers the candidate itself shares"
        f" {percent(itself, 0)}; to the baseline's answers it objects {percent(of_base, 0)} as"
        " often"
    )
    cause = "not clear"
    if itself >= _BAD and of_base <= _FINE:
        cause = "decode or speculation"
    elif itself <= _FINE and of_base > _FINE:
        cause = "weights or forward pass"
    elif itself > _FINE and of_base > _FINE:
        cause = "forward pass, and decode or speculation"
    return cause, shares


def judge_acceptance(drafted: Acceptance | None, reference: Acceptance | None) -> AcceptanceVerdict:
    """Acceptance at each draft position, against the baseline's if it drafts too."""
    if drafted is None:
        return AcceptanceVerdict("NOT JUDGED", "the candidate's /metrics were not to be had")
    if not drafted.drafts:
        return AcceptanceVerdict(
            "NOT JUDGED", "the candidate drafted nothing: speculative decoding was not tested"
        )
    rates = tuple(count / drafted.drafts for count in drafted.accepted)
    if reference is None or not reference.drafts:
        if rates and binomial_upper(drafted.accepted[0], drafted.drafts, ALPHA) < HOPELESS:
            return AcceptanceVerdict(
                "LOW", f"first drafts are accepted {percent(rates[0], 1)} of the time", rates
            )
        return AcceptanceVerdict(
            "NOT JUDGED", "the baseline does not draft: there is nothing to compare with", rates
        )
    expected = tuple(count / reference.drafts for count in reference.accepted)
    for position, (ours, theirs) in enumerate(zip(rates, expected, strict=False)):
        spread = math.sqrt(
            theirs * (1 - theirs) / reference.drafts + ours * (1 - ours) / drafted.drafts
        )
        # Drafts of one answer are not independent: twice the spread, at 3.3 of it for 0.001.
        if ours < theirs * (1 - ACCEPTANCE_MARGIN) - 2 * 3.3 * spread:
            return AcceptanceVerdict(
                "LOW",
                f"drafts at position {position + 1} are accepted {percent(ours, 1)} of the time,"
                f" by the baseline {percent(theirs, 1)}",
                rates,
                expected,
            )
    both = min(len(rates), len(expected))
    where = "" if len(rates) == len(expected) else f" up to position {both}, where both draft"
    return AcceptanceVerdict(
        "AS REFERENCE", f"not lower than the baseline's{where}", rates, expected
    )


def _warnings(
    outcome: Outcome, evidence: Evidence, figures: Figures, acceptance: AcceptanceVerdict
) -> list[str]:
    warnings = []
    if acceptance.outcome == "LOW":
        warnings.append(
            f"drafts are accepted too rarely: {acceptance.why}. The text does not suffer, the"
            " speed does"
        )
    if (
        outcome != "FAIL"
        and figures.p_gap < ALPHA
        and figures.mean_gap > 2 * figures.null_mean_gap + 1e-4
    ):
        warnings.append(
            f"the mean gap is {figures.mean_gap:.2g} nats, the baseline's own"
            f" {figures.null_mean_gap:.2g}: rounding of another layout, or slight damage"
        )
    unconfirmed = figures.outliers - figures.confirmed
    if unconfirmed and figures.outliers and evidence.pairs:
        tried = sum(
            len(p.candidate.outliers) - len(p.candidate.confirmed)
            for p in evidence.pairs
            if p.candidate.confirmed is not None
        )
        if tried:
            warnings.append(f"{tried} outliers were none when scored alone: the baseline wavers")
    return warnings


def _steps(cause: str, acceptance: AcceptanceVerdict, drafted: Acceptance | None) -> list[str]:
    undrafted = drafted is not None and not drafted.drafts
    steps = {
        "decode or speculation": "it drafts nothing, so the fault is in decoding: verify with fewer"
        " stages or another release; `mtppp patches` tells of known ones"
        if undrafted
        else "launch without the section `speculative`, and verify again: if it passes, the fault"
        " is in drafting; `mtppp patches` tells of known ones",
        "weights or forward pass": "compare the weights' files on all nodes; then verify with"
        " another layer_partition, or with tensor parallelism alone",
        "forward pass, and decode or speculation": "first find out about the forward pass: verify"
        " without the section `speculative`",
        "ends of answers": "compare the tokens that end an answer (generation_config.json), and"
        " look into the candidate's log for requests that were aborted",
        "sampling": "compare the samplers' settings and releases; greedy requests are right",
    }.get(cause)
    found = [steps] if steps else []
    if acceptance.outcome == "LOW":
        found.append("look whether the drafter's weights were loaded: `mtppp status`")
    return found


def percent(share: float, digits: int = 2) -> str:
    """As it is written in a report."""
    return f"{share * 100:.{digits}f} %"


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """A verdict for `result.json`."""
    figures = {name: getattr(verdict.figures, name) for name in Figures.__dataclass_fields__}
    acceptance = verdict.acceptance
    return {
        "verdict": verdict.outcome,
        "why": list(verdict.why),
        "cause": verdict.cause or None,
        "figures": figures,
        "power": {
            "damaged_tokens": _powers(verdict.token_power),
            "ruined_requests": _powers(verdict.request_power),
            "sampled_tokens": [
                {"share": share, "fails": chance} for share, chance in verdict.sampled_power.items()
            ],
        },
        "acceptance": {
            "verdict": acceptance.outcome,
            "why": acceptance.why,
            "rates": list(acceptance.rates),
            "reference": list(acceptance.reference),
        },
        "warnings": list(verdict.warnings),
        "next_steps": list(verdict.next_steps),
    }


def _powers(powers: Mapping[float, Power]) -> list[dict[str, float]]:
    return [
        {"share": share, "fails": power.fails, "not_passed": power.not_passed}
        for share, power in powers.items()
    ]
