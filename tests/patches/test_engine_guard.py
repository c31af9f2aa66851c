"""What the guard takes from vLLM's configuration; test_vllm.py has it inside vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mtppp_patches.engine_guard import as_configured, require_sound
from mtppp_patches.engine_spec import EngineSpec
from mtppp_patches.patch import PatchError, names_needed
from mtppp_patches.registry import PATCHES

PLANNED = EngineSpec("0.32.0", "glm4_moe", tensor=2, pipeline=2)


def configured(hf_overrides: Any) -> EngineSpec:
    return as_configured(engine(hf_overrides), PLANNED)


def engine(hf_overrides: Any, speculative: Any = None) -> SimpleNamespace:
    """What vLLM made of its command line."""
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        enable_expert_parallel=False,
        enable_eplb=False,
    )
    model = SimpleNamespace(model_impl="auto", hf_overrides=hf_overrides)
    return SimpleNamespace(
        parallel_config=parallel, model_config=model, speculative_config=speculative
    )


@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        ({}, False),
        ({"rope_theta": 1.0, "text_config": {"num_hidden_layers": 4}}, False),
        ({"architectures": ["LlamaForCausalLM"]}, True),
        # Of models with an encoder, this is what chooses the classes of the decoder.
        ({"text_config": {"architectures": ["LlamaForCausalLM"]}}, True),
    ],
)
def test_overrides_that_choose_other_classes_are_seen_wherever_they_are(
    overrides: dict[str, Any], other: bool
) -> None:
    assert configured(overrides).other_classes == other


@pytest.mark.parametrize(
    ("tokens", "risk", "refused"),
    [(3, (), True), (3, ("drafter_embedding",), False), (0, (), False)],
)
def test_a_drafter_without_its_embedding_does_not_start_in_an_engine_either(
    tokens: int, risk: tuple[str, ...], refused: bool
) -> None:
    """MTP may be on the command line alone, and the file may go ahead with its family."""
    planned = EngineSpec(
        "0.32.0", "glm4_moe_lite", tensor=2, pipeline=2, at_own_risk=("unlisted_family", *risk)
    )
    planned = replace(planned, patches=names_needed(PATCHES, planned))
    mtp = SimpleNamespace(method="mtp", num_speculative_tokens=tokens) if tokens else None
    if refused:
        with pytest.raises(PatchError, match="glm4_moe_lite is without the model's embedding"):
            require_sound(engine({}, mtp), planned)
    else:
        assert require_sound(engine({}, mtp), planned) == bool(tokens)


def test_an_engine_that_is_told_what_its_file_says_is_what_was_planned() -> None:
    assert configured({}) == PLANNED
