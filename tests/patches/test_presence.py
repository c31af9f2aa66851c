"""Which rank must have what of a patch; what real ranks attested stands for the rest."""

from __future__ import annotations

import pytest

from mtppp_patches import (
    attest,
    config_gate,
    draft_relay,
    drafter_weights,
    engine_guard,
    index_share,
    invariants,
    placement,
    stage_boundary,
    structured_drafts,
)
from mtppp_patches.patch import Patch
from mtppp_patches.presence import lacking
from mtppp_patches.registry import PATCHES

INIT_DEVICE = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
EXECUTE_MODEL = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model"
GENERIC_DRAFTER = "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP.load_weights"
NVIDIA_DRAFTER = "vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP.load_weights"
NVIDIA_MODEL = "vllm.models.deepseek_v32.nvidia.model:DeepseekV32Model.forward"
AMD_MODEL = "vllm.models.deepseek_v32.amd.model:DeepseekV32Model.forward"


def lacked(patch: Patch, *in_place: str, last: bool = True, release: str = "0.29.0") -> str:
    return "; ".join(lacking(patch, release, frozenset(in_place), last_stage=last))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "patch", [config_gate.PATCH, draft_relay.PATCH, structured_drafts.PATCH], ids=lambda p: p.name
)
def test_what_is_for_decoding_is_in_place_in_each_rank(patch: Patch, last: bool) -> None:
    names = [target.name for target in patch.targets if target.replace]
    assert lacked(patch, *names, last=last) == ""
    assert lacked(patch, *names[1:], last=last) == names[0]
    assert lacked(patch, last=last) == "; ".join(names)


def test_the_last_stage_has_a_drafter_with_its_embedding() -> None:
    patch = drafter_weights.PATCH
    assert lacked(patch, GENERIC_DRAFTER) == ""
    assert lacked(patch, NVIDIA_DRAFTER) == ""
    assert lacked(patch) == f"none of {GENERIC_DRAFTER}, {NVIDIA_DRAFTER}"
    assert lacked(patch, release="0.28.0") == f"none of {GENERIC_DRAFTER}"
    assert lacked(patch, last=False) == ""


@pytest.mark.parametrize("last", [False, True])
def test_each_stage_completes_what_it_hands_over(last: bool) -> None:
    patch = stage_boundary.PATCH
    assert lacked(patch, NVIDIA_MODEL, last=last) == ""
    assert lacked(patch, AMD_MODEL, last=last) == ""
    assert lacked(patch, last=last) == f"none of {NVIDIA_MODEL}, {AMD_MODEL}"


def test_of_the_others_a_rank_has_what_workers_run() -> None:
    for patch, of_the_engine in (
        (engine_guard.PATCH, "vllm.v1.executor.abstract:Executor.__init__"),
        (index_share.PATCH, "vllm.v1.engine.core:EngineCore.__init__"),
    ):
        assert lacked(patch, INIT_DEVICE) == ""
        assert lacked(patch, of_the_engine) == INIT_DEVICE
    assert lacked(invariants.PATCH, EXECUTE_MODEL) == ""
    assert lacked(invariants.PATCH) == EXECUTE_MODEL
    assert lacked(placement.PATCH) == ""
    assert lacked(attest.PATCH) == "vllm.v1.worker.worker_base:WorkerWrapperBase." + (
        "initialize_from_config"
    )


def test_every_patch_but_the_placement_must_be_somewhere() -> None:
    nowhere = [patch.name for patch in PATCHES if not lacked(patch)]
    assert nowhere == ["placement"]
