"""What the guard takes from vLLM's configuration; test_vllm.py has it inside vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtppp_patches.engine_guard import as_configured
from mtppp_patches.engine_spec import EngineSpec

PLANNED = EngineSpec("0.32.0", "glm4_moe", tensor=2, pipeline=2)


def configured(hf_overrides: Any) -> EngineSpec:
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
    engine = SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=None)
    return as_configured(engine, PLANNED)


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


def test_an_engine_that_is_told_what_its_file_says_is_what_was_planned() -> None:
    assert configured({}) == PLANNED
