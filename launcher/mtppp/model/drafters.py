"""Which class vLLM drafts with for `method: mtp`, release by release.

From `SpeculativeConfig.hf_config_override` and `models/registry.py` of 0.23.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_READ = (0, 23, 0)
LAST_READ = (0, 33, 0)


@dataclass(frozen=True)
class Drafter:
    """A draft architecture and the first release that uses it."""

    since: tuple[int, int, int]
    architecture: str


_DEEPSEEK = (Drafter((0, 23, 0), "DeepSeekMTPModel"),)
_DEEPSEEK_V32 = (
    Drafter((0, 23, 0), "DeepSeekMTPModel"),
    Drafter((0, 29, 0), "DeepseekV32MTPModel"),
)

_BY_TYPE: Mapping[str, tuple[Drafter, ...]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": _DEEPSEEK_V32,
    "qwen3_next": (Drafter((0, 23, 0), "Qwen3NextMTP"),),
    "qwen3_5": (Drafter((0, 23, 0), "Qwen3_5MTP"),),
    "qwen3_5_moe": (Drafter((0, 23, 0), "Qwen3_5MoeMTP"),),
    # A checkpoint with the text part alone is known to the drafter from 0.28.0 on.
    "qwen3_5_text": (Drafter((0, 28, 0), "Qwen3_5MTP"),),
    "qwen3_5_moe_text": (Drafter((0, 28, 0), "Qwen3_5MoeMTP"),),
}

_BY_ARCHITECTURE: Mapping[str, tuple[Drafter, ...]] = {
    "Glm4MoeForCausalLM": (Drafter((0, 23, 0), "Glm4MoeMTPModel"),),
    "Glm4MoeLiteForCausalLM": (Drafter((0, 23, 0), "Glm4MoeLiteMTPModel"),),
    "MiMoForCausalLM": (Drafter((0, 23, 0), "MiMoMTPModel"),),
    "MiMoV2FlashForCausalLM": (Drafter((0, 23, 0), "MiMoV2MTPModel"),),
    "MiMoV2ForCausalLM": (Drafter((0, 23, 0), "MiMoV2MTPModel"),),
    "MiMoV2OmniForCausalLM": (Drafter((0, 23, 0), "MiMoV2OmniMTPModel"),),
}


def drafters(model_type: str, architecture: str) -> tuple[Drafter, ...]:
    """The model's drafters in ascending order of release; () for a model mtppp has none for."""
    return _BY_TYPE.get(model_type) or _BY_ARCHITECTURE.get(architecture, ())


def drafter(model_type: str, architecture: str, release: str) -> str | None:
    """The draft architecture in `release` ("0.32.0").

    None when the model has none there, or when the release has not been read: before 0.23.0, or
    a later minor release than 0.33.
    """
    version = parse_release(release)
    if version is None or version < FIRST_READ or version[:2] > LAST_READ[:2]:
        return None
    known = [entry for entry in drafters(model_type, architecture) if entry.since <= version]
    return known[-1].architecture if known else None


def parse_release(release: str) -> tuple[int, int, int] | None:
    """(0, 32, 0) of "0.32.0", "v0.32.0+cpu" or "0.32"; None of anything else."""
    parts = release.removeprefix("v").split("+")[0].split(".")
    if not 2 <= len(parts) <= 3 or not all(part.isdigit() for part in parts):
        return None
    major, minor, *patch = (int(part) for part in parts)
    return (major, minor, patch[0] if patch else 0)
