"""The launcher plans cuts, the plugin judges them, each by its own rules: they must agree."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from typing import Any

import pytest

from mtppp.model.couplings import couplings
from mtppp_patches.index_share import stage_starts

GLM = json.loads(
    (files("mtppp.model") / "catalogue" / "zai-org--GLM-5.2-FP8" / "config.json").read_text()
)


def configurations() -> list[dict[str, Any]]:
    """GLM-5.2's, and variations of what decides which layers share."""
    source = random.Random(5)
    varied = [
        GLM
        | {
            "num_hidden_layers": source.randint(4, 60),
            "index_topk_freq": source.randint(1, 6),
            "index_skip_topk_offset": source.randint(1, 5),
            "indexer_types": None,
        }
        for _ in range(60)
    ]
    return [GLM, *varied]


@pytest.mark.parametrize("config", configurations())
def test_launcher_and_plugin_agree_on_legal_stage_starts(config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    assert couplings(config).legal_starts(layers) == stage_starts(config)
