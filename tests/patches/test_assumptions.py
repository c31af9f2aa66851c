"""What patches assume of sources that they do not replace."""

from __future__ import annotations

import pytest

from mtppp_patches.assumptions import ASSUMPTIONS
from mtppp_patches.engine_spec import EngineSpec, Speculative
from mtppp_patches.patch import Patch, known_fingerprints
from mtppp_patches.registry import PATCHES

RULES = "vllm.model_executor.models.deepseek_v2:DeepseekV2MLAAttention.__init__"
HAND_OVER = "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"


def leaned_on(release: str, family: str) -> dict[str, list[str]]:
    """What is verified and not replaced before an engine of this family starts, by patch."""
    spec = EngineSpec(
        release, family, tensor=8, pipeline=2, speculative=Speculative("mtp", 3), invariants="count"
    )
    return {
        patch.name: [target.name for target in patch.targets_for(spec) if target.replace is None]
        for patch in PATCHES
        if patch.needed(spec)
    }


def test_each_assumption_is_of_a_patch_and_stays_what_it_is() -> None:
    assert set(ASSUMPTIONS) <= {patch.name for patch in PATCHES}
    for patch in PATCHES:
        for target in ASSUMPTIONS.get(patch.name, ()):
            assert target in patch.targets
            assert target.replace is None


def test_the_rules_by_which_layers_share_indices_are_verified_where_they_matter() -> None:
    assert RULES in leaned_on("0.23.0", "glm_moe_dsa")["index_share"]
    assert RULES in leaned_on("0.32.0", "glm_moe_dsa")["index_share"]
    assert RULES not in leaned_on("0.32.0", "glm4_moe")["index_share"]


def test_how_stages_hand_over_and_steps_follow_is_verified() -> None:
    assert HAND_OVER in leaned_on("0.32.0", "glm_moe_dsa")["stage_boundary"]
    assert SCHEDULE in leaned_on("0.29.0", "glm4_moe")["draft_relay"]
    assert SCHEDULE in leaned_on("0.33.0", "glm4_moe")["invariants"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_fingerprint_of_each_target_is_recorded_for_each_release(patch: Patch) -> None:
    for target in patch.targets:
        recorded = known_fingerprints()[target.name]
        assert set(target.releases or patch.releases) <= set(recorded), target.name
