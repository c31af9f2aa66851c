"""The public recipe collection (vllm-project/recipes): from a model's YAML to commands.

A recipe says what a model needs; a strategy, one of a fixed vocabulary, says how it is divided; the
collection's page puts the two together. This does the same, in the same order: base arguments,
variant, strategy, hardware, features. Of a flag given twice the last counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from mtppp.errors import ConfigurationError

Layout = Literal["tp", "tp_pp", "tp_dp", "dp", "pair"]

NONE = "none"
"""The choice of no speculation."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a model is divided.

    Attributes:
        layout: what the GPUs are used for; "pair": a prefill and a decode engine.
        expert: expert layers are spread whole.
        several: over more than one node.
    """

    name: str
    layout: Layout
    expert: bool
    several: bool


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("single_node_tp", "tp", expert=False, several=False),
        Strategy("single_node_tep", "tp", expert=True, several=False),
        Strategy("single_node_dep", "dp", expert=True, several=False),
        Strategy("multi_node_tp", "tp", expert=False, several=True),
        Strategy("multi_node_tep", "tp", expert=True, several=True),
        Strategy("multi_node_tp_pp", "tp_pp", expert=False, several=True),
        Strategy("multi_node_tp_dp", "tp_dp", expert=False, several=True),
        Strategy("multi_node_dep", "dp", expert=True, several=True),
        Strategy("pd_cluster", "pair", expert=False, several=True),
    )
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What recipes call a GPU: by name, and by generation."""

    name: str
    generation: str


HARDWARE: Mapping[str, Hardware] = {
    "A100-80GB": Hardware("a100", "ampere"),
    "H100-80GB": Hardware("h100", "hopper"),
    "H20": Hardware("h20", "hopper"),
    "H200": Hardware("h200", "hopper"),
    "B200": Hardware("b200", "blackwell"),
}
"""By GPU type; the collection has no other that mtppp knows."""


@dataclass(frozen=True)
class Choice:
    """What a person picks on a recipe's page.

    Attributes:
        gpu: a key of `HARDWARE`.
        gpus: per node.
        nodes: for strategies over several nodes.
        speculation: a mode of the recipe's `spec_decoding`, or `NONE`.
        features: None: all that are not opt-in.
    """

    strategy: str
    gpu: str = "H100-80GB"
    gpus: int = 8
    nodes: int = 2
    variant: str = "default"
    speculation: str = NONE
    features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Recipe:
    """A model's recipe, as parsed."""

    values: Mapping[str, Any]
    origin: str
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def minimum_release(self) -> str | None:
        release = self.model.get("min_vllm_version")
        return str(release) if release else None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of those that the recipe offers."""
        return tuple(self.values.get("compatible_strategies") or ())

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to speculate."""
        feature = _mapping(self.values, "features").get("spec_decoding")
        if not isinstance(feature, Mapping):
            return ()
        modes = feature.get("modes")
        return tuple(modes) if isinstance(modes, Mapping) else ("mtp",)

    @property
    def default_features(self) -> tuple[str, ...]:
        """Features that are on unless somebody switches them off."""
        opt_in = self.values.get("opt_in_features") or ()
        return tuple(name for name in _mapping(self.values, "features") if name not in opt_in)


def is_recipe(text: str) -> bool:
    """Whether a text is a recipe and no command."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return (
        isinstance(values, dict)
        and isinstance(values.get("model"), dict)
        and "model_id" in values["model"]
    )


def read_recipe(text: str, origin: str) -> Recipe:
    """The recipe in a text that `is_recipe`."""
    values = yaml.safe_load(text)
    return Recipe(values, origin, values["model"])


def load_recipe(path: Path) -> Recipe:
    """Read a recipe's file.

    Raises:
        ConfigurationError: it is none.
    """
    text = path.read_text(encoding="utf-8")
    if not is_recipe(text):
        raise ConfigurationError(f"{path}: is no recipe: it has no model.model_id")
    return read_recipe(text, str(path))


def default_strategy(recipe: Recipe, nodes: int) -> str:
    """The strategy where nobody chose one: pipeline parallelism is what mtppp is for.

    Raises:
        ConfigurationError: the recipe has none for so many nodes.
    """
    wanted = ("multi_node_tp_pp", "multi_node_tp") if nodes > 1 else ("single_node_tp",)
    for name in wanted:
        if name in recipe.strategies:
            return name
    raise ConfigurationError(
        f"{recipe.origin}: no strategy for {nodes} nodes; it has {', '.join(recipe.strategies)}",
        hint="choose one with --strategy",
    )


def recipe_command(recipe: Recipe, choice: Choice) -> str:
    """The command of the first node, as the recipe's page has it: variables and all.

    Raises:
        ConfigurationError: the recipe has no such strategy, variant, mode or feature.
    """
    strategy = _strategy(recipe, choice)
    variant = _chosen(_mapping(recipe.values, "variants"), choice.variant, recipe, "variant")
    model = variant.get("model_id") or recipe.model["model_id"]
    arguments = [
        *_strings(recipe.model.get("base_args")),
        *_strings(variant.get("extra_args")),
        *_layout(strategy, choice),
        *_overridden(recipe, variant, strategy, choice, "extra_args", "vllm_args"),
        *_features(recipe, choice),
    ]
    env = {
        **_environment(recipe.model, "base_env"),
        **_environment(variant, "extra_env"),
        **dict(_override_env(recipe, variant, strategy, choice)),
    }
    prefix = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in env.items())
    words = " ".join(_quoted(word) for word in _last_wins(arguments))
    return f"{prefix} vllm serve {model} {words}".strip()


def _strategy(recipe: Recipe, choice: Choice) -> Strategy:
    name = choice.strategy
    if name not in recipe.strategies:
        raise ConfigurationError(
            f"{recipe.origin}: no strategy {name}; it has {', '.join(recipe.strategies)}"
        )
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"{recipe.origin}: strategy {name} is not one mtppp knows: {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]


def _layout(strategy: Strategy, choice: Choice) -> Iterator[str]:
    """The parallel sizes, as the strategies of the collection have them."""
    nodes = choice.nodes if strategy.several else 1
    total = choice.gpus * nodes
    if strategy.expert:
        yield "--enable-expert-parallel"
    match strategy.layout:
        case "tp":
            yield from ("--tensor-parallel-size", str(total))
        case "tp_pp":
            yield from ("--tensor-parallel-size", str(choice.gpus))
            yield from ("--pipeline-parallel-size", str(nodes))
        case "tp_dp":
            yield from ("--tensor-parallel-size", str(choice.gpus))
            yield from ("--data-parallel-size", str(nodes), "--data-parallel-size-local", "1")
            yield from ("--data-parallel-address", "$HEAD_IP")
        case "dp":
            yield from ("--data-parallel-size", str(total))
            if nodes > 1:
                yield "--data-parallel-hybrid-lb"
                yield from ("--data-parallel-size-local", str(choice.gpus))
                yield from ("--data-parallel-address", "$HEAD_IP")
        case "pair":
            yield from ("--tensor-parallel-size", str(choice.gpus))
            yield "--kv-transfer-config"
            yield '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
    if nodes > 1 and strategy.layout in ("tp", "tp_pp"):
        yield from ("--nnodes", str(nodes), "--node-rank", "0", "--master-addr", "$HEAD_IP")


def _overridden(
    recipe: Recipe, variant: Mapping[str, Any], strategy: Strategy, choice: Choice, *keys: str
) -> Iterator[str]:
    """Arguments of a strategy's and of the hardware's overrides.

    An override for a GPU generation below the strategy stands in place of the recipe's and the
    variant's; one for the exact GPU is added to whatever there is.
    """
    for override in _overrides(recipe, variant, strategy, choice):
        for key in keys:
            yield from _strings(override.get(key))


def _override_env(
    recipe: Recipe, variant: Mapping[str, Any], strategy: Strategy, choice: Choice
) -> Iterator[tuple[str, Any]]:
    for override in _overrides(recipe, variant, strategy, choice):
        yield from {**_environment(override, "env"), **_environment(override, "extra_env")}.items()


def _overrides(
    recipe: Recipe, variant: Mapping[str, Any], strategy: Strategy, choice: Choice
) -> Iterator[Mapping[str, Any]]:
    mine = _mapping(_mapping(recipe.values, "strategy_overrides"), strategy.name)
    hardware = HARDWARE[choice.gpu]
    yield _mapping(_mapping(variant, "hardware_overrides"), hardware.name)
    yield mine
    here = _of_generation(mine, hardware.generation)
    if here:
        yield here
    else:
        yield _of_generation(recipe.values, hardware.generation)
        yield _of_generation(variant, hardware.generation)
    yield _mapping(_mapping(mine, "hardware_overrides"), hardware.name)


def _of_generation(holder: Mapping[str, Any], generation: str) -> Mapping[str, Any]:
    overrides = _mapping(holder, "hardware_overrides")
    return _mapping(overrides, generation) or _mapping(overrides, "nvidia")


def _features(recipe: Recipe, choice: Choice) -> Iterator[str]:
    features = _mapping(recipe.values, "features")
    names = recipe.default_features if choice.features is None else choice.features
    for name in names:
        yield from _feature(
            _chosen(features, name, recipe, "feature"), recipe, choice, mode=choice.speculation
        )
    if choice.speculation != NONE and "spec_decoding" not in names:
        feature = _chosen(features, "spec_decoding", recipe, "feature")
        yield from _feature(feature, recipe, choice, mode=choice.speculation)


def _feature(
    feature: Mapping[str, Any], recipe: Recipe, choice: Choice, *, mode: str
) -> Iterator[str]:
    allowed = feature.get("strategies")
    if allowed and choice.strategy not in allowed:
        return
    holder = feature
    if isinstance(feature.get("modes"), Mapping):
        if mode == NONE:
            return
        holder = _chosen(feature["modes"], mode, recipe, "speculative mode")
        variants = holder.get("variants")
        if variants and choice.variant not in variants:
            raise ConfigurationError(
                f"{recipe.origin}: {mode} is for the variants {', '.join(variants)}, not "
                f"{choice.variant}"
            )
    own = _of_generation(holder, HARDWARE[choice.gpu].generation)
    yield from _strings(own.get("args", holder.get("args")))


def _chosen(mapping: Mapping[str, Any], name: str, recipe: Recipe, what: str) -> Mapping[str, Any]:
    chosen = mapping.get(name)
    if isinstance(chosen, Mapping):
        return chosen
    if name == "default" and not mapping:
        return {}
    raise ConfigurationError(
        f"{recipe.origin}: no {what} {name}; it has {', '.join(mapping) or 'none'}"
    )


def _mapping(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = holder.get(key)
    return value if isinstance(value, Mapping) else {}


def _strings(value: object) -> Sequence[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _environment(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    return dict(_mapping(holder, key))


def _last_wins(arguments: Sequence[str]) -> list[str]:
    """Of a flag given twice, the last with its value."""
    units: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") or not units:
            units.append([argument])
        else:
            units[-1].append(argument)
    last = {unit[0]: index for index, unit in enumerate(units)}
    return [word for index, unit in enumerate(units) if last[unit[0]] == index for word in unit]


def _quoted(word: str) -> str:
    """Quoted for a shell, but for variables that are still to be filled in."""
    return word if word.startswith("$") else shlex.quote(word)
