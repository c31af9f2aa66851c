from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from published import QWEN3_NEXT

from mtppp.cli.model import command as model
from mtppp.errors import ConfigurationError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(model, ["inspect", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_glm_5_2_for_people() -> None:
    shown = run("zai-org/GLM-5.2-FP8", "--kv-cache-dtype", "fp8")
    for piece in (
        "78 (3 dense, 75 mixture of experts) + 1 MTP",
        "753.33 B, of which MTP 9.95 B",
        "53,940 B per token, 54,728 with the MTP layers",
        "DeepSeekMTPModel from 0.23.0, DeepseekV32MTPModel from 0.29.0",
        "indexer   FFFsssFsssFsss",
        "start     ^^^   ^   ^",
    ):
        assert piece in shown


def test_glm_5_2_as_json() -> None:
    report = json.loads(run("zai-org/GLM-5.2-FP8", "--json", "--kv-cache-dtype", "fp8"))
    assert report["parameters"] == pytest.approx(753.33e9, rel=1e-5)
    assert report["couplings"]["stage_starts"][:5] == [0, 1, 2, 6, 10]
    assert report["layers"][39]["indexer"] == "shared"
    assert report["layers"][42]["cache_bytes_per_token"] == 656 + 132
    assert report["unknowns"] == []


def test_a_state_per_request(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    shown = run(str(tmp_path))
    assert "MiB per request" in " ".join(shown.split())
    assert "attention nnnAnnnA" in shown


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    config = {"model_type": "unheard_of", "num_hidden_layers": 4, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = run(str(tmp_path))
    assert "Not known: weights and cache per layer" in shown
    assert "parameters    not known" in shown
    assert json.loads(run(str(tmp_path), "--json"))["layers"] is None


def test_an_error_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        run(str(tmp_path))
