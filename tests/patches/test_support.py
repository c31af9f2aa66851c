"""The compatibility data, and the decision made from it."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mtppp_patches import support as module
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.fingerprint import fingerprint_file
from mtppp_patches.observations import SAME_STEP
from mtppp_patches.registry import PATCHES
from mtppp_patches.releases import RELEASES, releases
from mtppp_patches.support import DECODE, Evidence, Family, Support, admissible, parse, support

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "patches/evidence"
sys.path.append(str(ROOT / "scripts"))

from class_evidence import verdict  # noqa: E402
from config_gate import as_it_must_be  # noqa: E402
from relay_matrix import (  # noqa: E402
    CANDIDATES,
    PREEMPTED,
    SCENARIOS,
    WHOLE_PROMPTS,
    WITH_PARTS,
    Arm,
    reference_of,
)
from stage_evidence import verdict as verdict_on_stages  # noqa: E402
from support_release import circumstances  # noqa: E402

FILE = Path(module.__file__).with_name("support.json")


def deployment(**changes: object) -> EngineSpec:
    spec = EngineSpec(
        "0.29.0", "deepseek_v3", tensor=2, pipeline=2, speculative=Speculative("mtp", 3)
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def data(**levels: str) -> Support:
    """Data in which deepseek_v3 on 0.29.0 has this evidence and nothing else is listed."""
    evidence = {
        name: Evidence(level, "deepseek_v3", "2026-01-01", "here")  # type: ignore[arg-type]
        for name, level in levels.items()
    }
    family = Family("deepseek_v3", "m:C", "patched", evidence)
    return Support("2026-01-01", {"0.29.0": {"deepseek_v3": family}}, support().refusals)


PROVEN = {"drafter_weights": "class", DECODE: "engine"}


def codes(spec: EngineSpec, facts: Support | None = None) -> list[str]:
    return [refusal.code for refusal in admissible(spec, facts or data(**PROVEN)).refusals]


def test_the_file_is_canonical_and_complete() -> None:
    parsed = support()
    assert set(parsed.refusals) == set(module._CONDITIONS)
    for release, families in parsed.releases.items():
        for family in families.values():
            where = f"{release} {family.model_type}"
            assert ":" in family.drafter, where
            assert DECODE in family.evidence, where
    for refusal in parsed.refusals.values():
        assert refusal.reason, refusal.code
        assert refusal.way_out, refusal.code


def cited() -> list[tuple[str, str, Family, Evidence]]:
    """Everything that support.json says was shown: release, what, family, evidence."""
    return [
        (release, key, family, evidence)
        for release, families in support().releases.items()
        for family in families.values()
        for key, evidence in family.evidence.items()
    ]


@pytest.mark.parametrize(
    ("release", "key", "family", "evidence"),
    cited(),
    ids=[f"{release}-{family.model_type}-{key}" for release, key, family, _ in cited()],
)
def test_a_row_claims_no_more_than_its_record_shows(
    release: str, key: str, family: Family, evidence: Evidence
) -> None:
    record = ROOT / evidence.record
    assert record.is_file(), evidence.record
    result = json.loads(record.read_text())
    assert (result["release"], result["date"]) == (release, evidence.date)
    if key == DECODE:
        assert evidence.level == "engine"
        assert result["model_type"] == evidence.on
        assert_engines_were_right(result)
        for left_out in circumstances(result):
            assert left_out in family.note
    else:
        assert evidence.level == result["level"]
        assert evidence.on == family.model_type
        assert evidence.on in result["shows"].get(key, [])


def shown_by(record: str, release: str) -> dict[str, str]:
    """Patch -> level, of what a record shows of a release."""
    if record.endswith(".py"):
        return {"placement": "engine"} if release in launched_in(ROOT / record) else {}
    result = json.loads((ROOT / record).read_text(encoding="utf-8"))
    if record.endswith("config-gate.json"):
        right = as_it_must_be(release, result["releases"][release])
        return {"config_gate": "config"} if right else {}
    assert result["release"] == release
    if "arms" not in result:
        shown = dict.fromkeys(result["shows"], result["level"])
        # Each run of these classes was watched, and what is wrong without the patch was noticed.
        return shown | ({"invariants": "class"} if "stage_boundary" in shown else {})
    assert_engines_were_right(result)
    arms = [arm for arm in result["arms"].values() if arm["pipeline"] > 1]
    everywhere = [
        {name for name, ranks in arm["attested"].items() if len(ranks) == world(arm)}
        for arm in arms
    ]
    watched = {"invariants"} if all(arm["invariants"]["checks"][SAME_STEP] for arm in arms) else {}
    return dict.fromkeys(set.intersection(*everywhere) | set(watched), "engine")


def launched_in(file: Path) -> set[str]:
    """The releases that tests of a file launch: those of tests that enter `launched(...)`."""
    found: set[str] = set()
    for test in ast.parse(file.read_text(encoding="utf-8")).body:
        nodes = [*ast.walk(test)]
        named = {ast.unparse(node.func): node for node in nodes if isinstance(node, ast.Call)}
        if not isinstance(test, ast.FunctionDef) or "launched" not in named:
            continue
        found |= {
            ast.literal_eval(word.value)
            for node in nodes
            if isinstance(node, ast.Call)
            for word in node.keywords
            if word.arg == "release" and isinstance(word.value, ast.Constant)
        }
        if (each := named.get("pytest.mark.parametrize")) is not None:
            names = ast.literal_eval(each.args[0])
            rows = each.args[1].elts if isinstance(each.args[1], ast.List) else []
            at = names.index("release") if "release" in names else None
            found |= {
                ast.literal_eval(row.elts[at])
                for row in rows
                if at is not None and isinstance(row, ast.Tuple)
            }
    return found


def test_placement_was_shown_where_a_test_launches() -> None:
    """Each release that a test of the lab names, and no other."""
    rows = [row for row in support().patches if row.patch == "placement"]
    assert {row.record for row in rows} == {"tests/lab/test_launch.py"}
    assert {release for row in rows for release in row.releases} == launched_in(
        ROOT / "tests/lab/test_launch.py"
    )


def world(arm: Mapping[str, Any]) -> int:
    ranks: int = arm["pipeline"] * arm["tensor"]
    return ranks


@pytest.mark.parametrize("release", RELEASES)
def test_of_no_patch_more_is_said_than_its_record_shows(release: str) -> None:
    for patch in PATCHES:
        if release not in patch.releases:
            assert not any(
                row.patch == patch.name and release in row.releases for row in support().patches
            )
            continue
        shown = support().shown(patch.name, release)
        if shown.record:
            assert shown_by(shown.record, release)[patch.name] == shown.level, patch.name
        # Tokens that are right do not show what a guard refuses or a watch tells.
        right = shown.record.endswith((f"{release}-demo-glm4-moe.json", ".py"))
        if patch.scope == "deployment" and right and shown.label == "engine":
            assert (patch.name, release) == ("placement", "0.27.1"), "three hosts, as in the file"


def test_the_public_reproduction_is_on_record_for_every_release() -> None:
    releases = json.loads((EVIDENCE / "config-gate.json").read_text())["releases"]
    assert tuple(releases) == RELEASES
    for release, results in releases.items():
        assert as_it_must_be(release, results), release
        assert results["shipped"].keys() >= {"glm_moe_dsa", "glm4_moe", "deepseek_v3"}


def test_what_is_said_not_to_be_shown_has_no_row() -> None:
    for row in support().not_shown:
        for release in row.releases:
            listed = support().releases.get(release, {})
            assert listed.keys().isdisjoint(row.families or listed), release


def assert_engines_were_right(result: dict[str, Any]) -> None:
    """A whole matrix: every scenario in every layout, nothing wrong in any."""
    assert result["right"]
    left_out = set(result["left_out"])
    assert left_out <= (set(WITH_PARTS) if result["model_type"] in WHOLE_PROMPTS else set())
    every = set(SCENARIOS) - left_out
    if (result["release"], result["model"]) in OLDER:
        every.remove(LATER)
    for arm in (*CANDIDATES, *map(reference_of, CANDIDATES)):
        assert_arm_was_right(result["release"], arm, result["arms"][arm.name], every)


LATER = "one_left"
OLDER = {
    *((release, "demo-glm4-moe") for release in releases("0.24.0", "0.33.0")),
    *((release, "demo-deepseek-v3") for release in releases("0.26.0", "0.33.0")),
    *((release, "demo-glm-moe-dsa") for release in ("0.29.0", "0.32.0")),
}
"""Matrices that are older than this scenario."""
ONE_LEFT = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.29.0", "0.30.0", "0.32.0")
"""Releases with a record of its own for it."""
COUNTER_LOSES = ("0.26.0", "0.27.1")
"""vLLM's own counter of cached tokens, which older matrices have, does over three stages."""

WRONG = ("wrong", "other_steps", "invalid", "other_than_reference")


def assert_arm_was_right(
    release: str, arm: Arm, ran: Mapping[str, Any], scenarios: set[str]
) -> None:
    assert asdict(arm).items() <= ran.items()
    assert ran["right"], arm.name
    for name, scenario in ran["scenarios"].items():
        assert not any(scenario.get(fault) for fault in WRONG), (arm.name, name)
    if arm.small_cache:
        assert set(ran["scenarios"]) == set(PREEMPTED), arm.name
        assert all(scenario["preemptions"] for scenario in ran["scenarios"].values()), arm.name
        return
    assert set(ran["scenarios"]) == scenarios, arm.name
    if LATER in scenarios and release in releases("0.25.1", RELEASES[-1]):
        assert ran["padded_first_steps"] > 0, arm.name
    lost = release in COUNTER_LOSES and arm.pipeline == 3 and "padded_first_steps" not in ran
    if "prefix_hits" in scenarios and not lost:
        assert ran["prefix_hits"] > 0, arm.name


@pytest.mark.parametrize("release", ONE_LEFT)
def test_first_steps_with_placeholders_and_cached_prefixes_were_right(release: str) -> None:
    """What older matrices lack, over two and three stages."""
    record = json.loads((EVIDENCE / f"{release}-demo-glm4-moe-one-left.json").read_text())
    assert (record["release"], record["model_type"]) == (release, "glm4_moe")
    assert record["right"]
    for arm in CANDIDATES:
        if arm.name in ("pp2-k3", "pp3-k3"):
            for ran in (arm, reference_of(arm)):
                assert_arm_was_right(release, ran, record["arms"][ran.name], {"prefix_hits", LATER})


def test_the_one_scenario_of_the_release_that_has_no_row_was_right() -> None:
    record = json.loads((EVIDENCE / "0.23.0-demo-glm4-moe-ends.json").read_text())
    assert (record["release"], record["model_type"], record["right"]) == (
        "0.23.0",
        "glm4_moe",
        True,
    )
    arm = next(arm for arm in CANDIDATES if arm.name == "pp2-k3")
    for ran in (arm, reference_of(arm)):
        assert_arm_was_right("0.23.0", ran, record["arms"][ran.name], {"ends"})


def test_a_matrix_that_lacks_a_part_shows_nothing() -> None:
    """Each part once."""
    right = json.loads((EVIDENCE / "0.32.0-demo-glm4-moe.json").read_text())
    assert_engines_were_right(right)
    for change in (
        lambda record: record["left_out"].update(prefix_hits="no reason"),
        lambda record: record["arms"].pop("pp3-k3-preempted"),
        lambda record: record["arms"].pop("tp2-pp1-k3"),
        lambda record: record["arms"]["pp2-k1"]["scenarios"].pop("aborts"),
        lambda record: record["arms"]["pp2-k1"].update(prefix_hits=0),
        lambda record: record["arms"]["pp2-k1"].update(fault="relay_off"),
        lambda record: record["arms"]["pp2-k1"]["scenarios"]["ends"].update(wrong=1),
        lambda record: record["arms"]["pp2-k5-preempted"]["scenarios"]["preemption"].update(
            preemptions=0
        ),
        lambda record: record.update(release="0.34.0"),
    ):
        changed = json.loads(json.dumps(right))
        change(changed)
        with pytest.raises((AssertionError, KeyError)):
            assert_engines_were_right(changed)


@pytest.mark.parametrize(
    "file", sorted(EVIDENCE.glob("*-classes.json")), ids=lambda file: str(file.stem)
)
def test_what_a_record_of_classes_shows_follows_from_its_figures(file: Path) -> None:
    record = json.loads(file.read_text())
    assert file.name == f"{record['release']}-classes.json"
    judged = verdict({key: record["runs"].get(key, []) for key in record["problems"]})
    assert {key: record[key] for key in judged} == judged


@pytest.mark.parametrize(
    "file", sorted(EVIDENCE.glob("*-stages.json")), ids=lambda file: str(file.stem)
)
def test_what_a_record_of_stages_shows_follows_from_its_figures(file: Path) -> None:
    record = json.loads(file.read_text())
    assert file.name == f"{record['release']}-stages.json"
    judged = verdict_on_stages(record["runs"])
    assert {key: record[key] for key in judged} == judged


def test_engines_whose_figures_are_off_show_nothing() -> None:
    """Each figure that decides, once as it must not be."""
    runs = json.loads((EVIDENCE / "0.32.0-stages.json").read_text())["runs"]
    shown = set(verdict_on_stages(runs)["shows"])
    assert shown == {"stage_boundary", "index_share"}
    single, half = "stage_boundary_float32", "stage_boundary_bfloat16"
    for key, name, change in (
        (single, "patched", {"gaps": [2e-3]}),
        (single, "patched", {"ended": True}),
        (single, "patched", {"hand_overs_unequal": 1}),
        (single, "patched", {"hand_overs_checked": 0}),
        (single, "unpatched", {"gaps": [1e-2]}),
        (single, "unpatched", {"hand_overs_unequal": 0}),
        (single, "without_stages", {"classes": ["vllm.model_executor.models.deepseek_v2.Model"]}),
        (half, "patched", {"alone": [0.0]}),
        (half, "patched_mtp", {"accepted": 0}),
        ("index_share", "legal", {"violations": 1}),
        ("index_share", "legal", {"reads": {"others": 1}}),
        ("index_share", "within", {"reads": {"others": 0}}),
        ("index_share", "within, refused", {"ended_with": []}),
        ("index_share", "within, invariant", {"ended_with": []}),
    ):
        changed = json.loads(json.dumps(runs))
        next(run for run in changed[key] if run["name"] == name).update(change)
        left = set(verdict_on_stages(changed)["shows"])
        assert shown - left == {key.removesuffix("_float32").removesuffix("_bfloat16")}, change


def test_figures_that_are_off_show_nothing() -> None:
    """Each figure that decides, once as it must not be."""
    runs = json.loads((EVIDENCE / "0.32.0-classes.json").read_text())["runs"]
    assert set(verdict(runs)["shows"]) == set(runs)
    for key, wanted, change in (
        ("stage_boundary", {"patched": True, "dtype": "float32"}, {"relative_error": 2e-5}),
        ("stage_boundary", {"patched": False}, {"relative_error": 9e-3}),
        ("stage_boundary", {"patched": True, "dtype": "bfloat16"}, {"equal_to_tensor_only": False}),
        ("stage_boundary", {"patched": True}, {"handed_over_equal": False}),
        ("stage_boundary", {"patched": True}, {"summed": [4, 6]}),
        ("index_share", {"experiment": "rules"}, {"differ": [{}]}),
        ("index_share", {"partition": "40,38"}, {"engine": "starts"}),
        ("index_share", {"partition": "42,36"}, {"engine": "attends with indices"}),
        ("index_share", {"partition": "40,38"}, {"workers": ["starts", "starts"]}),
        ("drafter_weights", {}, {"embedding": False}),
    ):
        changed = json.loads(json.dumps(runs))
        entry = next(run for run in changed[key] if wanted.items() <= run.items())
        entry.update(change)
        assert set(runs) - set(verdict(changed)["shows"]) == {key}, change


def test_records_are_of_the_patches_as_they_are() -> None:
    for file in EVIDENCE.glob("*.json"):
        record = json.loads(file.read_text())
        made_by = record.get("command", "scripts/relay_matrix.py")
        for name, recorded in record.get("patches", {}).items():
            source = ROOT / f"patches/mtppp_patches/{name}.py"
            stale = f"{name} has changed since {file.name}: run {made_by} again"
            assert fingerprint_file(source) == recorded, stale


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema"),
        ({"releases": {"0.1.0": {}}}, "unknown releases: 0.1.0"),
        ({"row": {"decode": "good"}}, "0.32.0.glm4_moe: decode 'good'"),
        ({"row": {"evidence": {"magic": {}}}}, "no patch of a model: magic"),
        (
            {
                "row": {
                    "evidence": {"decode": {"level": "rumour", "on": "", "date": "", "record": ""}}
                }
            },
            "level 'rumour'",
        ),
    ],
)
def test_a_malformed_file_is_an_error(change: dict[str, dict[str, object]], message: str) -> None:
    content = json.loads(FILE.read_text())
    if row := change.pop("row", None):
        content["releases"]["0.32.0"]["glm4_moe"] |= row
    with pytest.raises(ValueError, match=message):
        parse(json.dumps(content | change))


def test_proven_is_allowed_with_the_patches_it_needs() -> None:
    verdict = admissible(deployment(), data(**PROVEN))
    assert verdict.allowed
    assert verdict.reason == ""
    assert set(verdict.evidence) == {DECODE, "drafter_weights"}
    assert {"draft_relay", "drafter_weights"} <= set(verdict.patches)


@pytest.mark.parametrize("level", ["class", "config", "read"])
def test_decoding_needs_engine_evidence(level: str) -> None:
    assert codes(deployment(), data(**PROVEN | {DECODE: level})) == ["unproven_decode"]


def test_broken_decoding_is_refused_whatever_ran() -> None:
    facts = data(**PROVEN)
    row = facts.releases["0.29.0"]["deepseek_v3"]
    broken = dataclasses.replace(row, decode="broken")
    facts = dataclasses.replace(facts, releases={"0.29.0": {"deepseek_v3": broken}})
    assert codes(deployment(), facts) == ["unproven_decode"]


@pytest.mark.parametrize("level", ["config", "read", None])
def test_a_needed_patch_needs_class_evidence(level: str | None) -> None:
    levels = {DECODE: "engine"} | ({"drafter_weights": level} if level else {})
    verdict = admissible(deployment(), data(**levels))
    assert [refusal.code for refusal in verdict.refusals] == ["unproven_patch"]
    assert "drafter_weights" in verdict.reason


def test_without_speculation_decoding_evidence_is_not_asked_for() -> None:
    assert codes(deployment(speculative=None), data(**{DECODE: "read"})) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"release": "0.34.0"}, "unknown_release"),
        ({"model_type": "llama"}, "unlisted_family"),
        ({"release": "0.28.0"}, "unlisted_family"),
        ({"model_type": "glm4_moe_lite"}, "drafter_embedding"),
        ({"model_type": "inkling_model", "release": "0.33.0"}, "drafter_embedding"),
        ({"runner": "v1"}, "v1_runner"),
        ({"async_scheduling": False}, "sync_scheduling"),
        ({"speculative": Speculative("eagle3", 3)}, "speculative_method"),
        ({"eplb": True}, "eplb_pipeline"),
        ({"data_parallel": 2}, "unproven_parallelism"),
        ({"expert_parallel": True}, "unproven_parallelism"),
        ({"decode_context": 2}, "unproven_parallelism"),
        ({"other_classes": True}, "other_classes"),
        ({"eplb": True, "pipeline": 1}, "eplb_mtp"),
        (
            {"model_type": "glm_moe_dsa", "data_parallel": 2, "expert_parallel": True},
            "expert_data_parallel",
        ),
        (
            {"model_type": "glm_moe_dsa", "prefill_context": 2, "expert_parallel": True},
            "expert_data_parallel",
        ),
    ],
)
def test_refused_combinations(changes: dict[str, object], code: str) -> None:
    verdict = admissible(deployment(**changes), data(**PROVEN))
    assert code in [refusal.code for refusal in verdict.refusals]
    assert "{" not in verdict.reason + verdict.way_out


@pytest.mark.parametrize("release", RELEASES)
def test_it_is_known_what_other_methods_do(release: str) -> None:
    for method in {method for row in support().other_methods for method in row.methods}:
        found = [row for row in support().other_methods if row.covers(method, release)]
        assert len(found) == 1, (method, release)


def test_the_refusal_of_another_method_says_what_it_does() -> None:
    verdict = admissible(deployment(speculative=Speculative("eagle", 3)))
    assert "the first stage embeds zeros" in verdict.reason


@pytest.mark.parametrize("release", [*RELEASES, "0.34.0"])
def test_one_stage_needs_nothing(release: str) -> None:
    verdict = admissible(deployment(release=release, pipeline=1, model_type="llama"))
    assert verdict.allowed
    assert "draft_relay" not in verdict.patches


def test_going_ahead_at_ones_own_risk() -> None:
    levels = PROVEN | {DECODE: "read"}
    verdict = admissible(deployment(at_own_risk=("unproven_decode",)), data(**levels))
    assert verdict.allowed
    assert [refusal.code for refusal in verdict.at_own_risk] == ["unproven_decode"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "family", ["glm4_moe_lite", "pangu_ultra_moe", "kimi_k3", "kimi_linear", "inkling_mm_model"]
)
def test_a_drafter_without_its_embedding_is_told_to_who_goes_ahead(
    release: str, family: str
) -> None:
    """An override of what is merely not listed does not carry it along."""
    unlisted = deployment(release=release, model_type=family, at_own_risk=("unlisted_family",))
    verdict = admissible(unlisted)
    assert [refusal.code for refusal in verdict.refusals] == ["drafter_embedding"]
    assert f"the MTP drafter of {family} is without the model's embedding" in verdict.reason
    assert "leave out speculative" in verdict.way_out
    at_risk = dataclasses.replace(unlisted, at_own_risk=("unlisted_family", "drafter_embedding"))
    assert admissible(at_risk).allowed
    for changes in ({"speculative": None}, {"pipeline": 1}):
        assert admissible(dataclasses.replace(unlisted, **changes)).allowed  # type: ignore[arg-type]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("changes", "code"),
    [({"runner": "v1"}, "v1_runner"), ({"async_scheduling": False}, "sync_scheduling")],
)
def test_what_cannot_work_cannot_be_overridden(
    release: str, changes: dict[str, object], code: str
) -> None:
    assert code in codes(deployment(release=release, at_own_risk=(code,), **changes))
