from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from mtppp.errors import ConfigurationError
from mtppp.model.checkpoint import measure


def write_safetensors(path: Path, sizes: Mapping[str, int]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in sizes.items():
        header[name] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_index(directory: Path, weight_map: Mapping[str, str], total: int) -> None:
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )


SIZES = {
    "model.embed_tokens.weight": 100,
    "model.layers.0.self_attn.o_proj.weight": 10,
    "model.layers.1.mlp.down_proj.weight": 20,
    "model.layers.1.mlp.down_proj.weight_scale_inv": 4,
    "model.layers.2.eh_proj.weight": 7,
    "lm_head.weight": 100,
}


def test_one_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", SIZES)
    found = measure(tmp_path, 2)
    assert found is not None
    assert found.total == 241
    assert found.layers == {0: 10, 1: 24}
    assert found.mtp == 7
    assert not found.drafter_embedding


def test_files_the_index_names_and_no_others(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"model.layers.0.x": 3})
    write_safetensors(tmp_path / "b.safetensors", {"model.layers.1.x": 5})
    write_safetensors(tmp_path / "consolidated.safetensors", {"model.layers.0.x": 1000})
    write_index(
        tmp_path, {"model.layers.0.x": "a.safetensors", "model.layers.1.x": "b.safetensors"}, 8
    )
    found = measure(tmp_path, 2)
    assert found is not None
    assert found.total == 8


def test_the_index_alone_gives_the_total(tmp_path: Path) -> None:
    write_index(tmp_path, {"model.layers.2.embed_tokens.weight": "a.safetensors"}, 241)
    found = measure(tmp_path, 2)
    assert found is not None
    assert found.total == 241
    assert found.layers == {}
    assert found.mtp is None
    assert found.drafter_embedding


@pytest.mark.parametrize(
    ("name", "mtp"),
    [
        ("model.layers.2.mlp.gate.weight", True),
        ("model.mtp.layers.0.eh_proj.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("mtp.fc.weight", True),
        ("mtp.layers.0.self_attn.q_proj.weight", True),
        ("model.language_model.layers.1.mlp.gate.weight", False),
        ("model.visual.blocks.7.attn.qkv.weight", False),
    ],
)
def test_what_belongs_to_the_drafter(tmp_path: Path, name: str, mtp: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", {name: 9})
    found = measure(tmp_path, 2)
    assert found is not None
    assert found.mtp == (9 if mtp else 0)


def test_layers_of_a_vision_tower_are_not_the_models(tmp_path: Path) -> None:
    sizes = {"model.layers.0.x": 3, "model.vision_tower.layers.0.x": 50, "visual.layers.1.x": 70}
    write_safetensors(tmp_path / "model.safetensors", sizes)
    found = measure(tmp_path, 2)
    assert found is not None
    assert (found.layers, found.total) == ({0: 3}, 123)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert measure(tmp_path, 2) is None


@pytest.mark.parametrize(
    "data", [b"", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 3) + b"{{{"]
)
def test_a_damaged_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        measure(tmp_path, 2)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigurationError, match="index"):
        measure(tmp_path, 2)
