"""Exact sizes, where a checkpoint's safetensors files or their index are at hand.

Only headers are read: a file begins with their length (8 bytes, little endian) and their JSON.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtppp.errors import ConfigurationError

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 * 2**20
"""What the safetensors library accepts."""

_LAYER = re.compile(r"(?:^|\.)(mtp_layers|mtp\.layers|layers)\.(\d+)\.")
_DRAFTER_EMBEDDING = re.compile(
    r"(?:^|\.)layers\.(\d+)\.embed_tokens\.weight$|^mtp\.embed_tokens\."
)


@dataclass(frozen=True)
class Checkpoint:
    """What the tensors of a checkpoint take.

    Attributes:
        total: bytes of all tensors.
        layers: bytes by decoder layer; empty when only the index was there.
        mtp: bytes of all MTP layers; None when only the index was there.
        drafter_embedding: whether the MTP layers come with an embedding of their own.
    """

    total: int
    layers: Mapping[int, int]
    mtp: int | None
    drafter_embedding: bool


def measure(directory: Path, layer_count: int) -> Checkpoint | None:
    """Sizes of the checkpoint in `directory`; None when it holds no safetensors.

    Args:
        layer_count: decoder layers; higher numbers are MTP layers.

    Raises:
        ConfigurationError: a header or the index is damaged.
    """
    index = _read_index(directory / INDEX)
    names = sorted(set(index["weight_map"].values())) if index else None
    paths = (
        [directory / name for name in names]
        if names is not None
        else sorted(directory.glob("*.safetensors"))
    )
    if paths and all(path.is_file() for path in paths):
        return _sum(_headers(paths), layer_count)
    if index is None:
        return None
    total = index.get("metadata", {}).get("total_size")
    if not isinstance(total, int | float):
        return None
    return Checkpoint(
        total=int(total),
        layers={},
        mtp=None,
        drafter_embedding=_has_drafter_embedding(index["weight_map"], layer_count),
    )


def _read_index(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: not JSON: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ConfigurationError(f"{path}: has no weight_map")
    return index


def _headers(paths: Iterable[Path]) -> dict[str, int]:
    """Bytes by tensor name."""
    sizes: dict[str, int] = {}
    for path in paths:
        for name, entry in _header(path).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
    return sizes


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        first = file.read(8)
        if len(first) < 8:
            raise ConfigurationError(f"{path}: too short for a safetensors file")
        (length,) = struct.unpack("<Q", first)
        if length > _LONGEST_HEADER:
            raise ConfigurationError(
                f"{path}: no safetensors file: its header would have {length} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ConfigurationError(f"{path}: damaged header: {error}") from error
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path}: damaged header: not an object")
    return header


def _sum(sizes: Mapping[str, int], layer_count: int) -> Checkpoint:
    layers: dict[int, int] = {}
    mtp = 0
    for name, size in sizes.items():
        if _is_mtp(name, layer_count):
            mtp += size
            continue
        found = _LAYER.search(name)
        # A vision tower has layers too.
        if found and "visual" not in name and "vision" not in name:
            number = int(found[2])
            layers[number] = layers.get(number, 0) + size
    return Checkpoint(
        total=sum(sizes.values()),
        layers=dict(sorted(layers.items())),
        mtp=mtp,
        drafter_embedding=_has_drafter_embedding(sizes, layer_count),
    )


def _is_mtp(name: str, layer_count: int) -> bool:
    if name.startswith(("mtp.", "model.mtp.", "model.mtp_layers.")):
        return True
    found = _LAYER.search(name)
    return bool(found and found[1] == "layers" and int(found[2]) >= layer_count)


def _has_drafter_embedding(names: Iterable[str], layer_count: int) -> bool:
    for name in names:
        found = _DRAFTER_EMBEDDING.search(name)
        if found and (found[1] is None or int(found[1]) >= layer_count):
            return True
    return False
