from __future__ import annotations

import pytest

from mtppp.errors import ConfigurationError
from mtppp.model.config import find_config
from mtppp.model.couplings import Coupling, couplings, disagreement

GLM = find_config("zai-org/GLM-5.2-FP8", environ={}).values


def test_glm_5_2() -> None:
    found = couplings(GLM)
    assert found.known
    assert found.legal_starts(78) == (0, 1, 2, *range(6, 78, 4))
    cut = found.forbidding(39)
    assert cut is not None
    assert (cut.source, cut.last) == (38, 41)
    assert found.forbidding(38) is None
    assert found.forbidding(42) is None


def test_the_file_and_the_rule_agree() -> None:
    assert disagreement(GLM) == ""


def test_a_list_that_says_otherwise_is_reported() -> None:
    types = list(GLM["indexer_types"])
    types[6] = "shared"
    assert "layers 6;" in disagreement({**GLM, "indexer_types": types})


def test_a_pattern_goes_before_the_frequency() -> None:
    config = {**GLM, "num_hidden_layers": 6, "index_topk_pattern": "FFSSFS"}
    assert couplings(config).legal_starts(6) == (0, 1, 4)


def test_without_sharing_every_layer_may_begin_a_stage() -> None:
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 61, "index_topk": 2048}
    found = couplings(config)
    assert found.known
    assert found.legal_starts(61) == tuple(range(61))


@pytest.mark.parametrize("frequency", [0, -4, "4"])
def test_a_frequency_that_is_no_count(frequency: object) -> None:
    with pytest.raises(ConfigurationError, match="index_topk_freq"):
        couplings({**GLM, "index_topk_freq": frequency})


def test_a_pattern_that_begins_with_sharing() -> None:
    with pytest.raises(ConfigurationError, match="layer 0"):
        couplings({**GLM, "num_hidden_layers": 3, "index_topk_pattern": "SFF"})


def test_hy_v4_goes_by_its_list() -> None:
    config = {
        "model_type": "hy_v4",
        "num_hidden_layers": 5,
        "index_topk": 64,
        "indexer_types": ["full", "shared", "full", "full", "shared"],
    }
    assert couplings(config).legal_starts(5) == (0, 2, 3)
    with pytest.raises(ConfigurationError, match="5 entries for 6 layers"):
        couplings({**config, "num_hidden_layers": 6})


def test_deepseek_v41_takes_the_nearest_source() -> None:
    config = {
        "model_type": "deepseek_v41",
        "num_hidden_layers": 8,
        "compress_ratios": [0, 1, 1, 0, 2, 2, 0, 0],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 4],
        "candidate_source_layer_id": -1,
    }
    assert couplings(config).legal_starts(8) == (0, 1, 3, 4, 6, 7)
    unused = config | {"kv_source_layer_ids": [1, 4, 5]}
    spans = [(coupling.source, coupling.last) for coupling in couplings(unused).items]
    assert spans == [(1, 2), (1, 2), (4, 5)]
    # From the layer that publishes candidate blocks on, nothing may be cut.
    config |= {"candidate_source_layer_id": 4, "candidate_topk_blocks": 16}
    assert couplings(config).legal_starts(8) == (0, 1, 3, 4)


def test_gemma_shares_keys_and_values_at_the_end() -> None:
    config = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding", "full", "sliding", "full", "sliding", "full"],
    }
    assert couplings(config).items == (
        Coupling(2, 4, "the keys and values of layer 2 are re-used"),
        Coupling(3, 5, "the keys and values of layer 3 are re-used"),
    )
    assert couplings(config).legal_starts(6) == (0, 1, 2)


def test_of_an_unread_family_nothing_is_claimed() -> None:
    found = couplings({"model_type": "unheard_of", "num_hidden_layers": 4})
    assert not found.known
    assert "unheard_of" in found.evidence
