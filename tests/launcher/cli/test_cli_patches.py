from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtppp.cli.patches import command as patches

MODELS = Path(__file__).parents[3] / "cluster_configs/models"


def output(*arguments: str) -> str:
    return CliRunner().invoke(patches, arguments, catch_exceptions=False).stdout


def test_a_row_says_which_family_it_was_shown_with() -> None:
    glm = ("--model", "zai-org/GLM-5.2-FP8")
    leans = output("--vllm", "0.31.0", *glm).split("glm_moe_dsa", 1)[1]
    assert "decode: engine of deepseek_v3, 20" in leans
    assert "stage_boundary: class, 20" in leans
    assert "the model itself needs GPUs to run" in leans
    ran = output("--vllm", "0.32.0", *glm).split("glm_moe_dsa", 1)[1]
    assert "decode: engine, 20" in ran
    assert "stage_boundary: engine, 20" in ran
    assert "index_share: engine, 20" in ran


def test_a_patch_that_no_release_makes_obsolete() -> None:
    said = output()
    assert "still needed in 0.33.0" in said
    assert "obsolete by 0.32.0: GrammarOutput" in said
    assert "obsolete by no" not in said


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert all(len(line) <= 60 or " " not in line.strip() for line in output().splitlines())


def test_json_says_all_of_it() -> None:
    data = json.loads(output("--vllm", "0.31.0", "--json"))
    row = next(row for row in data["releases"] if row["family"] == "glm_moe_dsa")
    assert row["evidence"]["decode"]["on"] == "deepseek_v3"
    assert row["note"]


def test_of_one_release_nothing_is_said_about_others() -> None:
    said = " ".join(output("--vllm", "0.23.0").split())
    assert "nothing is proven on 0.23.0: refused" in said


def test_of_one_release_only_what_is_replaced_there() -> None:
    def replaced(*arguments: str) -> set[str]:
        patches = json.loads(output(*arguments, "--json"))["patches"]
        return {name for patch in patches for name in patch["replaces"]}

    later = "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP.load_weights"
    assert later in replaced()
    assert later in replaced("--vllm", "0.29.0")
    assert later not in replaced("--vllm", "0.28.0")


def test_of_a_model_only_what_it_may_need() -> None:
    def named(model: str) -> set[str]:
        data = json.loads(output("--model", model, "--json"))
        return {patch["name"] for patch in data["patches"]}

    of_glm_4, of_glm_5 = named(f"{MODELS}/demo-glm4-moe"), named("zai-org/GLM-5.2-FP8")
    assert {"draft_relay", "index_share", "placement", "invariants"} <= of_glm_4
    assert of_glm_5 - of_glm_4 == {"drafter_weights", "stage_boundary"}


def test_each_patch_says_how_far_it_was_shown_on_each_release() -> None:
    patches = {row["name"]: row for row in json.loads(output("--json"))["patches"]}
    for row in patches.values():
        assert list(row["shown"]) == row["releases"]
    gate = patches["config_gate"]["shown"]
    assert (gate["0.23.0"]["level"], gate["0.29.0"]["level"]) == ("config", "engine")
    said = output("--vllm", "0.23.0")
    assert "evidence: config (0.23.0)" in said
    assert "evidence: read (0.23.0)" in said


def test_what_could_not_be_shown_says_why() -> None:
    of_all = " ".join(output("--vllm", "0.23.0").split())
    assert "0.23.0: one scenario of glm4_moe" in of_all
    model = "zai-org/GLM-5.2-FP8"
    of_one = " ".join(output("--vllm", "0.27.1", "--model", model).split())
    assert "MLA is not supported on CPU" in of_one
    assert "MLA" not in output("--vllm", "0.29.0", "--model", model)


def test_a_patch_that_was_only_in_place_is_not_called_shown() -> None:
    patches = {row["name"]: row for row in json.loads(output("--json"))["patches"]}
    assert patches["engine_guard"]["shown"]["0.32.0"]["in_place"]
    assert not patches["index_share"]["shown"]["0.32.0"]["in_place"]
    said = " ".join(output("--vllm", "0.32.0").split())
    guard, _, others = said.partition("index_share")
    assert "evidence: in place (0.32.0)" in guard
    assert "evidence: engine (0.32.0)" in others
    assert "in place: it was on every rank of engines whose tokens were right; what it" in said


def test_what_is_otherwise_over_stages_is_told_of_the_releases_that_have_it() -> None:
    said = " ".join(output("--vllm", "0.31.0").split())
    assert "requests under a grammar (JSON schema, regex, tool calls) get one token a step" in said
    assert "vLLM itself may pad that step with drafts" in said
    assert len(json.loads(output("--vllm", "0.23.0", "--json"))["limits"]) == 1
    assert "under a grammar (JSON schema, regex, tool calls) get" not in output("--vllm", "0.32.0")


def test_other_methods_are_told_as_far_as_they_concern_the_release() -> None:
    rows = json.loads(output("--vllm", "0.29.0", "--json"))["other_methods"]
    assert all(row["releases"] == ["0.29.0"] for row in rows)
    [eagle] = [row for row in rows if row["methods"] == ["eagle"]]
    assert "the first stage embeds zeros" in eagle["does"]
    assert {"eagle3", "dflash", "dspark", "draft_model"} <= {
        m for row in rows for m in row["methods"]
    }
