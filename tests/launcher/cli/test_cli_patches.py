from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mtppp.cli.patches import command as patches


def output(*arguments: str) -> str:
    return CliRunner().invoke(patches, arguments, catch_exceptions=False).stdout


def test_a_row_says_which_family_it_was_shown_with() -> None:
    row = output("--vllm", "0.32.0", "--model", "zai-org/GLM-5.2-FP8").split("glm_moe_dsa", 1)[1]
    assert "decode: engine of deepseek_v3, 20" in row
    assert "stage_boundary: engine, 20" in row
    assert "index_share: engine, 20" in row
    assert "the model itself needs GPUs to run" in row


def test_a_patch_that_no_release_makes_obsolete() -> None:
    said = output()
    assert "still needed in 0.33.0" in said
    assert "obsolete by 0.32.0: GrammarOutput" in said
    assert "obsolete by no" not in said


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert all(len(line) <= 60 or " " not in line.strip() for line in output().splitlines())


def test_json_says_all_of_it() -> None:
    data = json.loads(output("--vllm", "0.32.0", "--json"))
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
