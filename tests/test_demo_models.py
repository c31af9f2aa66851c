"""The checked-in demo models and prompts, read with the standard library alone."""

import hashlib
import json
import struct
from array import array
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "cluster_configs" / "models"
PROMPTS = MODELS / "demo-prompts.json"
PROMPTS_SHA256 = "71304aa2fbac2af329b192ccc66a4a46e701c79ef2791728f8e5b09d2a33a434"
MAX_BYTES = 8_000_000
ARCHITECTURES = {
    "demo-glm4-moe": "Glm4MoeForCausalLM",
    "demo-deepseek-v3": "DeepseekV3ForCausalLM",
    "demo-glm-moe-dsa": "GlmMoeDsaForCausalLM",
}


@pytest.fixture(params=sorted(ARCHITECTURES))
def model(request: pytest.FixtureRequest) -> Path:
    return MODELS / str(request.param)


@pytest.fixture(scope="module")
def demo_text() -> ModuleType:
    spec = spec_from_file_location("demo_text", ROOT / "scripts" / "demo_model" / "text.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def read_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """The dtype and the bytes of every tensor of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {
        name: (entry["dtype"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def test_fits_its_size(model: Path) -> None:
    assert sum(path.stat().st_size for path in model.iterdir()) <= MAX_BYTES


def test_config_allows_pp3_and_tp4_with_one_mtp_layer(model: Path) -> None:
    config = read_json(model / "config.json")
    assert config["architectures"] == [ARCHITECTURES[model.name]]
    assert config["dtype"] == "bfloat16"
    assert config["num_hidden_layers"] >= 6
    assert config["num_nextn_predict_layers"] == 1
    assert 0 < config["first_k_dense_replace"] < config["num_hidden_layers"]
    for size in (
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
    ):
        assert config[size] % 4 == 0, size


def test_tensors_are_the_layers_of_the_config(model: Path) -> None:
    config = read_json(model / "config.json")
    names = set(read_tensors(model / "model.safetensors"))
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == set(range(config["num_hidden_layers"] + 1))
    experts = {name.split(".")[5] for name in names if ".mlp.experts." in name}
    assert experts == {str(expert) for expert in range(config["n_routed_experts"])}
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert {f"{mtp}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")} <= names
    assert {name for name in names if not name.startswith("model.layers.")} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_tensors_are_finite_and_of_the_types_of_the_family(model: Path) -> None:
    for name, (dtype, data) in read_tensors(model / "model.safetensors").items():
        if name.endswith("e_score_correction_bias"):
            assert dtype == "F32", name
            continue
        assert dtype == "BF16", name
        assert all(value & 0x7F80 != 0x7F80 for value in array("H", data)), name


def test_mtp_layer_holds_copies_of_embedding_and_head(model: Path) -> None:
    tensors = read_tensors(model / "model.safetensors")
    mtp = f"model.layers.{read_json(model / 'config.json')['num_hidden_layers']}."
    assert tensors[f"{mtp}embed_tokens.weight"] == tensors["model.embed_tokens.weight"]
    assert tensors[f"{mtp}shared_head.head.weight"] == tensors["lm_head.weight"]


def test_tokenizer_agrees_with_the_config(model: Path, demo_text: ModuleType) -> None:
    config = read_json(model / "config.json")
    tokenizer = read_json(model / "tokenizer.json")
    settings = read_json(model / "tokenizer_config.json")
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert set(ids) == set(demo_text.SPECIAL_TOKENS)
    generation = read_json(model / "generation_config.json")
    for name in ("bos", "eos", "pad"):
        assert config[f"{name}_token_id"] == ids[settings[f"{name}_token"]]
        assert generation[f"{name}_token_id"] == ids[settings[f"{name}_token"]]
    assert tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"] == demo_text.BOS
    assert settings["chat_template"] == demo_text.CHAT_TEMPLATE


def test_card_states_licence_and_text_sources(model: Path) -> None:
    card = (model / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "## Text and licences" in card
    assert "scripts/demo_model/text.py" in card


def test_prompts_are_the_pinned_ones(demo_text: ModuleType) -> None:
    content = PROMPTS.read_bytes()
    assert hashlib.sha256(content).hexdigest() == PROMPTS_SHA256
    document = json.loads(content)
    assert document["prompts"] == demo_text.prompts()
    assert document["max_new_tokens"] == demo_text.MAX_NEW_TOKENS


def test_prompts_are_many_and_distinct() -> None:
    prompts = read_json(PROMPTS)["prompts"]
    assert len(prompts) >= 200
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({(prompt["kind"], prompt["text"]) for prompt in prompts}) == len(prompts)
    assert {prompt["kind"] for prompt in prompts} == {"chat", "completion"}
