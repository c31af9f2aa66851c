"""Recipes of the public collection: their commands, and the check of every strategy."""

from __future__ import annotations

import pytest
from importing import RECIPE

from mtppp.errors import ConfigurationError
from mtppp.importer.recipe import (
    NONE,
    Choice,
    Recipe,
    default_strategy,
    is_recipe,
    load_recipe,
    read_recipe,
    recipe_command,
)
from mtppp.importer.strategies import Checked, check_strategies
from mtppp.model.facts import ModelFacts


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(RECIPE)


def test_the_reported_command(recipe: Recipe) -> None:
    """The last --kv-cache-dtype, Hopper's, counts; features come last."""
    command = recipe_command(recipe, Choice("multi_node_tp_pp", speculation="mtp"))
    assert command == (
        "vllm serve zai-org/GLM-5.2-FP8 --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--nnodes 2 --node-rank 0 --master-addr $HEAD_IP --kv-cache-dtype fp8 "
        "--tool-call-parser glm47 --enable-auto-tool-choice --reasoning-parser glm45 "
        """--speculative-config '{"method":"mtp","num_speculative_tokens":5}'"""
    )


def test_without_an_override_the_base_arguments_stand(recipe: Recipe) -> None:
    command = recipe_command(recipe, Choice("single_node_tp", gpu="B200"))
    assert "--kv-cache-dtype fp8_e4m3" in command
    assert "speculative" not in command


def test_a_variant_has_its_own_checkpoint(recipe: Recipe) -> None:
    choice = Choice("single_node_tp", gpu="B200", variant="nvfp4", speculation="mtp")
    assert "nvidia/GLM-5.2-NVFP4" in recipe_command(recipe, choice)
    with pytest.raises(ConfigurationError, match="dspark is for the variants default"):
        recipe_command(recipe, Choice("single_node_tp", variant="nvfp4", speculation="dspark"))


def test_a_strategy_override_stands_in_place_of_the_hardware_s(recipe: Recipe) -> None:
    values = dict(recipe.values)
    values["strategy_overrides"] = {
        "single_node_tp": {
            "extra_args": ["--max-num-seqs", "8"],
            "extra_env": {"A": 1},
            "hardware_overrides": {"hopper": {"extra_args": ["--dtype", "half"]}},
        }
    }
    overridden = Recipe(values, recipe.origin, recipe.model)
    command = recipe_command(overridden, Choice("single_node_tp"))
    assert command.startswith("A=1 vllm serve")
    assert "--max-num-seqs 8 --dtype half" in command
    assert "--kv-cache-dtype fp8_e4m3" in command


def test_features_may_be_for_some_strategies_only() -> None:
    text = (
        "model: {model_id: o/m}\ncompatible_strategies: [single_node_tp]\n"
        "features: {x: {args: [--dtype, half], strategies: [multi_node_tp]}}\n"
    )
    assert recipe_command(read_recipe(text, "r"), Choice("single_node_tp")) == (
        "vllm serve o/m --tensor-parallel-size 8"
    )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("multi_node_dp"), "no strategy multi_node_dp"),
        (Choice("single_node_tp", variant="int4"), "no variant int4"),
        (Choice("single_node_tp", speculation="eagle"), "no speculative mode eagle"),
        (Choice("single_node_tp", features=("vision",)), "no feature vision"),
    ],
)
def test_what_a_recipe_does_not_have(recipe: Recipe, choice: Choice, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        recipe_command(recipe, choice)


def test_default_strategy(recipe: Recipe) -> None:
    assert default_strategy(recipe, 2) == "multi_node_tp_pp"
    assert default_strategy(recipe, 1) == "single_node_tp"


@pytest.mark.parametrize("text", ["vllm serve org/m", "name: x\nmodel: {id: o/m}", "a: [", "7"])
def test_what_is_no_recipe(text: str) -> None:
    assert not is_recipe(text)


# ---- the check that the page lacks -----------------------------------------------------------


def outcomes(checked: tuple[Checked, ...]) -> dict[str, str]:
    return {f"{entry.strategy} {entry.speculation}": entry.outcome for entry in checked}


def find(checked: tuple[Checked, ...], strategy: str, speculation: str) -> str:
    """The reasons of one entry, as one text."""
    (entry,) = [c for c in checked if (c.strategy, c.speculation) == (strategy, speculation)]
    return "\n".join(entry.reasons)


def test_every_strategy_on_h100(recipe: Recipe, glm_5_2: ModelFacts) -> None:
    checked = check_strategies(recipe, glm_5_2, Choice("", gpu="H100-80GB"))
    found = outcomes(checked)
    assert len(found) == 7 * 3
    for strategy in recipe.strategies:
        assert found[f"{strategy} dspark"] == "cannot"
    for strategy in ("single_node_tp", "single_node_tep"):
        assert found[f"{strategy} mtp"] == found[f"{strategy} {NONE}"] == "cannot"
        assert "704 GiB of weights" in find(checked, strategy, "mtp")
    for strategy in ("multi_node_tp", "multi_node_tep"):
        assert found[f"{strategy} mtp"] == "with changes"
        assert "1,048,576 tokens do not fit" in find(checked, strategy, "mtp")
    assert found["multi_node_dep mtp"] == found["pd_cluster mtp"] == "cannot"
    # Proven or not, it is never right as it is.
    assert found["multi_node_tp_pp mtp"] in ("not today", "with changes")
    assert "39/39 is illegal" in find(checked, "multi_node_tp_pp", NONE)
    assert "39/39 is illegal" in find(checked, "multi_node_tp_pp", "mtp")


def test_patches_of_the_oldest_release_the_recipe_allows(
    recipe: Recipe, glm_5_2: ModelFacts
) -> None:
    checked = check_strategies(recipe, glm_5_2, Choice("", gpu="H200"))
    found = outcomes(checked)
    assert found["multi_node_tp mtp"] == "as is"
    assert found["single_node_tp mtp"] == "with changes"
    reasons = find(checked, "multi_node_tp_pp", "mtp")
    if found["multi_node_tp_pp mtp"] == "not today":
        assert "patch config_gate: on vLLM 0.23.0" in reasons
        assert "patch draft_relay" in reasons


def test_a_model_nobody_here_knows(recipe: Recipe) -> None:
    checked = outcomes(check_strategies(recipe, None, Choice("")))
    assert checked["multi_node_tp_pp mtp"] == "not judged"
    assert checked["multi_node_dep mtp"] == "cannot"
