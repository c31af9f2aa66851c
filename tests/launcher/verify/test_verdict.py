"""Each verdict is justified: by hand-made evidence, at the edges."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtppp.engine.bulk import Answer, Scores
from mtppp.engine.client import Acceptance
from mtppp.verify.evidence import DAMAGED, evidence_by_stored, evidence_of, would_fail
from mtppp.verify.measure import PARTED, SPOTLESS, Judged, Pair
from mtppp.verify.record import Likeliest, Record
from mtppp.verify.run import confirmed_requests
from mtppp.verify.statistics import binomial_lower, binomial_upper
from mtppp.verify.tiers import TIERS, Tier
from mtppp.verify.verdict import (
    Control,
    Direction,
    Directions,
    Evidence,
    Sampled,
    Verdict,
    judge,
    judge_acceptance,
)

SMOKE = TIERS["smoke"]
MET = Control({0.001: 50, 0.01: 100}, {0.001: 47, 0.01: 95}, True, 20, 20)
NONE = Direction(0, 0)


def judged(outliers: int = 0, *flags: str, tokens: int = 32, confirmed: bool = True) -> Judged:
    positions = tuple(range(outliers))
    return Judged(tokens, positions, positions if confirmed else (), 0.0, frozenset(flags))


def pairs(candidate: Sequence[Judged], null: Sequence[Judged], of: int = 300) -> list[Pair]:
    """So many pairs, the first ones with these answers."""
    good = judged()
    return [
        Pair(
            f"p{i}",
            "prose",
            candidate[i] if i < len(candidate) else good,
            null[i] if i < len(null) else good,
        )
        for i in range(of)
    ]


def verdict(
    candidate: Sequence[Judged] = (), null: Sequence[Judged] = (), of: int = 300, **other: Any
) -> Verdict:
    evidence = Evidence(SMOKE, pairs(candidate, null, of), 1.0, MET, Direction(500, 0))
    return judge(dataclasses.replace(evidence, **other))


def test_nothing_found_and_control_met_is_pass() -> None:
    found = verdict()
    assert found.outcome == "PASS"
    assert found.figures.token_bound < SMOKE.token_margin
    assert found.token_power[0.01].fails > 0.999
    assert found.token_power[0.001].not_passed > 0.8


def test_damage_in_many_requests_is_fail() -> None:
    assert verdict([judged(1)] * 12).outcome == "FAIL"


def test_a_few_outliers_decide_nothing() -> None:
    found = verdict([judged(1)] * 8)
    assert found.outcome == "INCONCLUSIVE"
    assert "may be damaged" in found.why[0]
    assert "--tier certify" in found.next_steps[0]


def test_one_prompt_alone_never_fails() -> None:
    assert verdict([judged(32)]).outcome == "INCONCLUSIVE"


def test_what_the_baseline_does_itself_is_no_fault() -> None:
    assert verdict([judged(1)] * 12, [judged(1)] * 12).outcome == "INCONCLUSIVE"


def test_outliers_that_do_not_persist_never_fail() -> None:
    found = verdict([judged(1, confirmed=False)] * 40)
    assert found.outcome == "INCONCLUSIVE"
    assert any("scored alone" in warning for warning in found.warnings)


def test_rounding_of_another_layout_is_tolerated() -> None:
    """In 2,048 long answers even 60 requests with an outlier are below 1 token in 10,000."""
    long = [judged(1, tokens=512)] * 60
    good = judged(tokens=512)
    many = [Pair(f"p{i}", "prose", long[i] if i < 60 else good, good) for i in range(2048)]
    evidence = Evidence(TIERS["soak"], many, 1.0, MET, NONE)
    assert judge(evidence).outcome == "PASS"


def test_ruined_requests_fail_and_one_withholds_pass() -> None:
    assert verdict([judged(0, "empty", tokens=0)] * 12).outcome == "FAIL"
    found = verdict([judged(0, "truncated")])
    assert found.outcome == "INCONCLUSIVE"
    assert "may be ruined" in found.why[0]


def test_outliers_that_were_not_scored_again_count_for_the_bound() -> None:
    """Only so many requests are scored again; the others are not sound for that."""
    untried = dataclasses.replace(judged(3, tokens=512), confirmed=None)
    good = judged(tokens=512)
    many = [Pair(f"p{i}", "prose", untried if i < 12 else good, good) for i in range(2048)]
    found = judge(Evidence(TIERS["soak"], many, 1.0, MET, NONE))
    assert found.outcome == "INCONCLUSIVE"
    assert "12 may be of 2048" in found.why[0]
    assert (found.figures.ruined, found.figures.may_be_ruined) == (0, 12)


def test_a_raised_threshold_leaves_enough_requests_for_a_pass() -> None:
    """Half of the prompts is judged by it; the bound of requests is of all, above 1 nat."""
    good = judged(tokens=512)
    every = [Pair(f"p{i}", "prose", good, good) for i in range(512)]
    evidence = Evidence(TIERS["certify"], every[1::2], 1.4, MET, NONE, fixed=every)
    found = judge(evidence)
    assert found.outcome == "PASS", found.why
    assert found.figures.request_bound == pytest.approx(1 - 0.001 ** (1 / 512))
    ruined = [dataclasses.replace(every[0], candidate=judged(3, tokens=512)), *every[1:]]
    assert judge(dataclasses.replace(evidence, fixed=ruined)).outcome == "INCONCLUSIVE"


def test_evidence_by_a_raised_threshold_is_of_half_the_prompts_and_bounds_all(
    tmp_path: Path,
) -> None:
    ones = array("l", [1] * 400)
    noisy = array("d", [*[0.0] * 399, 1.4])
    record = Record(tmp_path)
    record.note("asked", {"tokens": 400})
    for i in range(512):
        key = f"p{i}"
        record.prompts[key] = ("prose", (1, 2))
        for stage in ("candidate", "null"):
            record.answers.setdefault(stage, {})[key] = Answer(tuple(range(400)), "length")
            scores = Scores(noisy, ones, ones, noisy)
            record.scores.setdefault(stage, {})[key] = scores
    found = evidence_of(record, TIERS["certify"])
    assert (found.above, len(found.pairs)) == (1.4, 256)
    assert found.fixed is not None
    assert [len(found.fixed), *found.fixed[0].candidate.outliers] == [512, 399]


def test_the_ratio_of_the_token_bound_has_a_half_of_alpha_for_each_factor() -> None:
    figures = verdict().figures
    assert figures.sensitivity == binomial_lower(142, 150, 0.0005)
    assert figures.token_bound == binomial_upper(0, 9600, 0.0005) / figures.sensitivity
    assert "if damage is spread over requests" in verdict().why[0]


def test_outliers_of_the_baseline_narrow_no_bound() -> None:
    """Where damage is in few requests, drawing those anew makes the bound."""
    lumps = [judged(10)] * 3
    alone = verdict(lumps).figures.token_bound
    assert alone > binomial_upper(30, 9600, 0.0005) / MET.sensitivity
    assert verdict(lumps, [judged()] * 3 + lumps).figures.token_bound == alone


def test_flags_that_the_baseline_has_too_are_none() -> None:
    assert verdict([judged(0, "empty")] * 20, [judged(0, "empty")] * 20).outcome == "PASS"
    assert verdict([judged(0, "loop")] * 20).outcome == "PASS"
    assert verdict([judged(1, "loop")] * 20).figures.ruined == 20


@pytest.mark.parametrize(
    "control",
    [
        None,
        Control({0.001: 20, 0.01: 20}, {0.001: 20, 0.01: 20}, True, 20, 20),
        Control({0.001: 50, 0.01: 100}, {0.001: 47, 0.01: 95}, False, 20, 20),
        Control({0.001: 50, 0.01: 100}, {0.001: 47, 0.01: 95}, True, 20, 10),
        Control({0.001: 50, 0.01: 100}, {0.001: 47, 0.01: 95}, True, 0, 0),
        Control({0.001: 50, 0.01: 100}, {0.001: 5, 0.01: 9}, True, 20, 20),
        Control({0.001: 50, 0.01: 100}, {0.001: 0, 0.01: 0}, True, 20, 20),
    ],
    ids=["none", "too few", "not FAIL", "ruin missed", "no ruin", "insensitive", "blind"],
)
def test_no_pass_without_the_control(control: Control | None) -> None:
    assert verdict(control=control).outcome == "INCONCLUSIVE"


def test_few_prompts_are_told_how_many_are_needed() -> None:
    found = verdict(of=20)
    assert found.outcome == "INCONCLUSIVE"
    assert "give at least 273 prompts" in found.next_steps


def test_no_prompts_at_all() -> None:
    assert verdict(of=0).outcome == "INCONCLUSIVE"


def test_a_baseline_that_wavers_gives_no_verdict() -> None:
    found = verdict([judged(20)] * 100, [judged(20)] * 100)
    assert found.outcome == "INCONCLUSIVE"
    assert "the baseline disagrees" in found.why[0]
    assert verdict(alone=Direction(500, 100)).outcome == "INCONCLUSIVE"


def test_a_mismatch_stands_above_all_figures() -> None:
    found = verdict([judged(20)] * 100, reasons=["another tokenizer"])
    assert (found.outcome, found.why) == ("INCONCLUSIVE", ("another tokenizer",))


def test_other_number_formats_explain_outliers_and_hide_no_pass() -> None:
    differ = {"formats": ("bfloat16", "a finer format than bfloat16")}
    found = verdict([judged(1)] * 30, **differ)
    assert found.outcome == "INCONCLUSIVE"
    assert "the candidate computes in bfloat16, the baseline in a finer" in found.why[0]
    assert "are none that the baseline would have emitted" in found.why[1]
    assert verdict([judged(1)] * 30, formats=("bfloat16", "bfloat16")).outcome == "FAIL"
    assert verdict([judged(1)] * 30, formats=("", "bfloat16")).outcome == "FAIL"
    assert verdict(**differ).outcome == "PASS"


def test_sampling_alone_can_fail() -> None:
    found = verdict(sampled=Sampled(1600, 1e-5), directions=Directions(NONE, NONE, NONE, NONE))
    assert (found.outcome, found.cause) == ("FAIL", "sampling")
    assert verdict(sampled=Sampled(1600, 0.01)).outcome == "PASS"


@pytest.mark.parametrize("flag", ["empty", "truncated", "cut short", "overlong", "end within"])
def test_ends_of_answers_are_no_matter_of_sampling(flag: str) -> None:
    directions = Directions(NONE, NONE, NONE, NONE)
    found = verdict([judged(0, flag)] * 12, directions=directions)
    assert (found.outcome, found.cause) == ("FAIL", "ends of answers")
    assert "cut off" in found.why[-1]


@pytest.mark.parametrize(
    ("cand_cand", "cand_base", "cause"),
    [
        (90, 0, "decode or speculation"),
        (2, 60, "weights or forward pass"),
        (60, 60, "forward pass, and decode or speculation"),
        (0, 0, "not clear"),
    ],
)
def test_directions_tell_the_cause(cand_cand: int, cand_base: int, cause: str) -> None:
    directions = Directions(
        *(Direction(1000, n) for n in (100, cand_cand, cand_base)), Direction(1000, 0)
    )
    assert verdict([judged(3)] * 40, directions=directions).cause == cause


def test_what_drafts_nothing_is_not_to_be_tried_without_drafts() -> None:
    directions = Directions(*(Direction(1000, n) for n in (100, 90, 0, 0)))

    def step(drafted: Acceptance) -> str:
        found = verdict([judged(3)] * 40, directions=directions, drafted=drafted)
        return found.next_steps[0]

    assert "launch without the section `speculative`" in step(Acceptance(100, (80, 60, 40)))
    assert "it drafts nothing, so the fault is in decoding" in step(Acceptance(0, ()))


def test_a_shift_of_all_gaps_is_a_warning() -> None:
    shifted = dataclasses.replace(judged(), gap=0.5)
    found = verdict([shifted] * 300)
    assert found.outcome == "PASS"
    assert "mean gap" in found.warnings[0]
    assert found.headline == "PASS, with a warning"


@pytest.mark.parametrize(
    ("drafted", "reference", "outcome"),
    [
        (None, None, "NOT JUDGED"),
        (Acceptance(0, ()), None, "NOT JUDGED"),
        (Acceptance(1000, (700, 400, 200)), None, "NOT JUDGED"),
        (Acceptance(1000, (20, 1, 0)), None, "LOW"),
        (Acceptance(1000, (700, 400, 200)), Acceptance(1000, (710, 390, 210)), "AS REFERENCE"),
        (Acceptance(1000, (700, 150, 20)), Acceptance(1000, (710, 390, 210)), "LOW"),
        (Acceptance(20, (12, 6, 2)), Acceptance(20, (15, 9, 6)), "AS REFERENCE"),
    ],
)
def test_acceptance_is_a_verdict_of_its_own(
    drafted: Acceptance | None, reference: Acceptance | None, outcome: str
) -> None:
    assert judge_acceptance(drafted, reference).outcome == outcome
    assert verdict(drafted=drafted, reference=reference).outcome == "PASS"


def test_positions_that_only_one_drafts_are_not_said_to_be_judged() -> None:
    found = judge_acceptance(Acceptance(1000, (700,)), Acceptance(1000, (700, 400, 200)))
    assert found.why == "not lower than the baseline's up to position 1, where both draft"


@pytest.mark.parametrize("tier", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("by_chance", [0.0, 0.02])
def test_enough_is_scored_again_for_a_fail(tier: Tier, by_chance: float, tmp_path: Path) -> None:
    """The more tokens are asked for, the more outliers are tolerated, and must be exceeded."""
    ones = array("l", [1] * tier.tokens)
    sound = array("d", [0.0] * tier.tokens)
    odd = array("d", [3.0, *sound[1:]])
    record = Record(tmp_path)
    record.scores = {"candidate": {}, "null": {}}
    for i in range(tier.requests):
        with_outlier = odd if i < by_chance * tier.requests else sound
        record.scores["candidate"][f"p{i}"] = Scores(odd, ones, ones, odd)
        record.scores["null"][f"p{i}"] = Scores(with_outlier, ones, ones, odd)
    tried = confirmed_requests(record, 1.0)
    untried = dataclasses.replace(judged(1, tokens=tier.tokens), confirmed=None)
    good, bad = judged(tokens=tier.tokens), judged(1, tokens=tier.tokens)
    many = [
        Pair(
            f"p{i}",
            "prose",
            bad if i < tried else untried,
            bad if i < by_chance * tier.requests else good,
        )
        for i in range(tier.requests)
    ]
    assert judge(Evidence(tier, many, 1.0, MET, NONE)).outcome == "FAIL"


def test_what_the_baseline_wavers_at_meets_no_control() -> None:
    """Its outliers that do not persist are none that damage would add."""
    wavering = [Pair(f"p{i}", "prose", judged(), judged(1, confirmed=False)) for i in range(300)]
    assert not would_fail(wavering, 0.0)
    assert would_fail(wavering, DAMAGED * MET.sensitivity)


def test_by_its_own_judgement_it_can_pass_and_is_told_apart() -> None:
    alone = [Pair(f"p{i}", "prose", judged(), SPOTLESS) for i in range(300)]
    assert would_fail(alone, DAMAGED * MET.sensitivity)
    evidence = Evidence(SMOKE, alone, 1.0, MET, NONE, itself=True, known=(12, 12))
    found = judge(evidence)
    assert (found.outcome, found.why[0][:20]) == ("PASS", "by its own judgement")
    assert "cannot see a wrong forward pass" in found.why[1]
    bad = [dataclasses.replace(pair, candidate=judged(1)) for pair in alone]
    found = judge(dataclasses.replace(evidence, pairs=bad))
    assert (found.outcome, found.cause) == ("FAIL", "decode or speculation")
    assert "1 token in 10,000: that much is taken for rounding" in found.why[-1]


def by_stored(parted: int, **other: Any) -> Verdict:
    """Of a certify run, so many of whose answers leave the stored ones with an outlier."""
    good = judged(tokens=512)
    many = [
        Pair(f"p{i}", "prose", judged(1, PARTED, tokens=512) if i < parted else good, good)
        for i in range(512)
    ]
    evidence = Evidence(TIERS["certify"], many, 1.0, MET, NONE, forced=[], **other)
    return judge(evidence)


def test_rounding_is_tolerated_by_a_stored_baseline_as_well() -> None:
    """26 tokens of these are. What follows such a one is not known: no PASS, and no FAIL."""
    found = by_stored(20)
    assert found.outcome == "INCONCLUSIVE"
    assert (found.figures.ruined, found.figures.may_be_ruined) == (0, 20)
    assert any("20 may be of 512" in why for why in found.why)
    assert by_stored(60).outcome == "FAIL"


def test_what_a_stored_baseline_does_not_know_is_not_promised() -> None:
    """Of a ruined request it sees one outlier: 5 % of requests are too few of those for a FAIL."""
    assert by_stored(26).request_power[0.05].fails < 0.01


def test_an_answer_that_parts_where_the_baseline_does_is_not_known_either() -> None:
    assert Pair("p", "prose", judged(1, PARTED), judged(1, PARTED)).may_be_ruined


def test_by_a_stored_baseline_nothing_was_scored_alone() -> None:
    found = by_stored(60)
    assert "60 of 262144 tokens are none that the baseline would have emitted (p" in found.why[0]


def test_gaps_of_a_stored_baseline_are_those_of_forced_tokens() -> None:
    good, shifted = judged(), dataclasses.replace(judged(), gap=0.5)
    forced = [Pair(f"p{i}", "prose", shifted, good) for i in range(300)]
    found = verdict(forced=forced)
    assert found.figures.mean_gap == pytest.approx(0.5 / 32)
    assert "mean gap" in found.warnings[0]


def test_a_stored_baseline_raises_the_threshold_as_another_does(tmp_path: Path) -> None:
    stored, record = Record(tmp_path), Record(tmp_path)
    ones, noisy = array("l", [1] * 400), array("d", [*[0.0] * 399, 1.4])
    answer = Answer(tuple(range(400)), "length")
    # The last token was another, 1.2 nats from the best: above 1 nat, and not above 1.4.
    other = Answer((*range(399), 500), "length")
    likeliest = Likeliest([*[{i: -0.1, 600: -5.0} for i in range(399)], {399: -0.5, 500: -1.7}])
    scores = Scores(noisy, ones, ones, noisy)
    for i in range(512):
        key = f"p{i}"
        stored.prompts[key] = ("prose", (1, 2))
        stored.likeliest[key] = likeliest
        for stage in ("null", "again"):
            stored.answers.setdefault(stage, {})[key] = answer
        stored.scores.setdefault("null", {})[key] = scores
        record.answers.setdefault("candidate", {})[key] = other
        record.scores.setdefault("reverse", {})[key] = scores
    stored.notes["asked"] = {"tokens": 400}
    found = evidence_by_stored(record, stored, TIERS["certify"])
    assert found.forced is not None
    assert found.fixed is not None
    assert (found.above, len(found.pairs), len(found.forced)) == (1.4, 256, 256)
    assert {pair.key for pair in found.pairs} == {f"p{i}" for i in range(1, 512, 2)}
    assert not any(pair.candidate.outliers for pair in found.pairs)
    assert [len(found.fixed), *found.fixed[0].candidate.outliers] == [512, 399]


@pytest.mark.parametrize("tier", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_one_percent_of_damage_is_fail_in_every_tier_and_in_half_of_it(
    tier: Tier, share: float
) -> None:
    """With hardly a hundred answers damaged on purpose, of a million tokens."""
    good = judged(tokens=tier.tokens)
    many = [Pair(f"p{i}", "prose", good, good) for i in range(int(share * tier.requests))]
    assert would_fail(many, DAMAGED * MET.sensitivity)
    assert not would_fail(many, 1e-5)
    assert not would_fail(many[:11], 1.0)
