"""What `scripts/support_release.py` compares and proposes, without running anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from class_evidence import families_of  # noqa: E402
from mtppp_patches import support as table  # noqa: E402
from mtppp_patches.releases import RELEASES  # noqa: E402
from mtppp_patches.support import parse  # noqa: E402
from support_release import changes, proposal  # noqa: E402

CLASSES = json.loads((ROOT / "patches/evidence/0.29.0-classes.json").read_text())


def engine(model: str, model_type: str, *, right: bool = True) -> dict[str, Any]:
    return {
        "model": model,
        "model_type": model_type,
        "date": "2026-01-02",
        "dtype": "float32",
        "right": right,
        "arms": {},
    }


def test_rows_are_what_support_json_takes_and_cite_their_records() -> None:
    rows = proposal("0.29.0", CLASSES, [engine("demo-glm4-moe", "glm4_moe")])
    whole = json.loads(Path(table.__file__).with_name("support.json").read_text())
    parsed = parse(json.dumps(whole | {"releases": {"0.29.0": rows}})).releases["0.29.0"]
    glm = parsed["glm_moe_dsa"]
    assert set(glm.evidence) == {"decode", "drafter_weights", "stage_boundary", "index_share"}
    assert (glm.evidence["decode"].on, glm.decode) == ("glm4_moe", "patched")
    assert glm.evidence["decode"].record == "patches/evidence/0.29.0-demo-glm4-moe.json"
    assert set(parsed["glm4_moe"].evidence) == {"decode"}
    assert "deepseek_v3" not in parsed, "it needs no GPU, and did not run"


def test_a_family_that_ran_wrong_is_broken_and_vouches_for_no_other() -> None:
    wrong = engine("demo-glm4-moe", "glm4_moe", right=False)
    assert proposal("0.29.0", CLASSES, []) == {}
    assert set(proposal("0.29.0", CLASSES, [wrong])) == {"glm4_moe"}
    rows = proposal("0.32.0", CLASSES, [wrong, engine("demo-deepseek-v3", "deepseek_v3")])
    assert rows["glm4_moe"]["decode"] == "broken"
    assert rows["glm_moe_dsa"]["decode"] == "native"
    assert rows["glm_moe_dsa"]["evidence"]["decode"]["on"] == "deepseek_v3"


def test_the_nearest_family_stands_in_and_the_drafter_is_the_releases() -> None:
    both = [engine("demo-glm4-moe", "glm4_moe"), engine("demo-deepseek-v3", "deepseek_v3")]
    glm = {release: proposal(release, CLASSES, both)["glm_moe_dsa"] for release in RELEASES}
    assert {row["evidence"]["decode"]["on"] for row in glm.values()} == {"deepseek_v3"}
    assert glm["0.28.0"]["drafter"] == "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP"
    assert glm["0.29.0"]["drafter"] == "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP"
    assert "needs GPUs" in glm["0.29.0"]["note"]


def test_classes_of_a_release_that_is_new_are_run_as_well() -> None:
    assert families_of("0.27.1") == []
    assert families_of("0.30.0") == ["nvidia", "dots3_note"]
    assert families_of(RELEASES[-1]) == families_of("0.34.0") == ["nvidia", "amd", "dots3_note"]


def test_what_ran_itself_needs_no_other() -> None:
    ran = [engine("demo-deepseek-v3", "deepseek_v3"), engine("demo-glm-moe-dsa", "glm_moe_dsa")]
    stages = {"shows": {"stage_boundary": ["glm_moe_dsa"]}, "date": "2026-01-03"}
    row = proposal("0.32.0", CLASSES, ran, stages)["glm_moe_dsa"]
    assert row["evidence"]["decode"]["on"] == "glm_moe_dsa"
    assert row["evidence"]["stage_boundary"] == {
        "level": "engine",
        "on": "glm_moe_dsa",
        "date": "2026-01-03",
        "record": "patches/evidence/0.32.0-stages.json",
    }
    assert row["evidence"]["index_share"]["level"] == "class"
    assert "plain torch" in row["note"]


def test_a_host_that_cannot_run_a_family_without_stages_shows_nothing_of_it() -> None:
    failed = engine("demo-glm-moe-dsa", "glm_moe_dsa", right=False)
    others = [engine("demo-deepseek-v3", "deepseek_v3")]
    for pipeline, decode in ((1, "native"), (2, "broken")):
        arms = {"an arm": {"pipeline": pipeline, "right": False, "failed": "it died"}}
        row = proposal("0.32.0", CLASSES, [*others, failed | {"arms": arms}])["glm_moe_dsa"]
        assert row["decode"] == decode


def test_a_row_says_whose_compiled_parts_ran() -> None:
    overlaid = engine("demo-glm4-moe", "glm4_moe") | {"compiled_parts": "0.32.0"}
    rows = proposal("0.33.0", CLASSES, [overlaid])
    assert rows["glm4_moe"]["note"].endswith("its own Python ran on 0.32.0's compiled parts")
    assert "needs GPUs" in rows["glm_moe_dsa"]["note"]
    assert "0.32.0's compiled parts" in rows["glm_moe_dsa"]["note"]
    built = overlaid | {"compiled_parts": "0.33.0"}
    assert "note" not in proposal("0.33.0", CLASSES, [built])["glm4_moe"]


def test_a_row_says_what_was_not_run_and_how_it_was() -> None:
    why = "vLLM has neither on CPUs"
    partly = engine("demo-deepseek-v3", "deepseek_v3") | {
        "left_out": {"chunked_prefill": why, "prefix_hits": why},
        "dtype": "bfloat16",
        "variables": {"VLLM_MLA_DISABLE": "1"},
    }
    rows = proposal("0.31.0", CLASSES, [partly])
    said = f"in bfloat16; with VLLM_MLA_DISABLE=1; not run: chunked prefill, prefix hits ({why})"
    assert rows["deepseek_v3"]["note"] == said
    assert rows["glm_moe_dsa"]["note"].endswith(f"decoding with another model; {said}")


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    first, *lines = changes("0.34.0", tmp_path)
    assert first == "compared with 0.33.0:"
    gone = "  gone: vllm.models.deepseek_v32.nvidia.model:DeepseekV32Model.forward (stage_boundary)"
    assert gone in lines
    assert not any("draft_relay" in line for line in lines), "obsolete since 0.30"
