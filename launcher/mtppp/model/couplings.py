"""Layers that must stand in one pipeline stage.

Only the hidden states (and the residual) cross from a stage to the next. Where a layer also uses
something an earlier layer left in a buffer or a cache of its own process, a cut between the two
gives it whatever is there instead: an older forward's data, possibly another request's.

Which families have such a coupling, and where that is known from (vLLM 0.23 to 0.33):

| family | what crosses | known from |
|---|---|---|
| glm_moe_dsa, deepseek_v32, glm4_moe_lite with `index_topk` | top-k indices of the nearest full indexer | `index_topk_pattern`, or `index_topk_freq` and `index_skip_topk_offset`: `deepseek_v2.py`, `deepseek_v32/attention.py` |
| hy_v4 | the same | `indexer_types`, else as above: `hy_v4/nvidia/attention.py` |
| deepseek_v41 | compressed KV and indices of the nearest source layer; the candidate blocks of one layer for all after it | `kv_source_layer_ids`, `index_source_layer_ids`, `candidate_source_layer_id`: `deepseek_v41/attention.py` |
| gemma3n, gemma4 | keys and values of the last unshared layers | `num_kv_shared_layers`, `layer_types`: `gemma3n.py`, `gemma4.py` |
| deepseek_v3, kimi_k2, glm4_moe, glm4_moe_lite, mimo, mimo_v2, qwen3_next, qwen3_5 | nothing | read: every layer takes `hidden_states` and `residual` only |

Of any other family mtppp says that it does not know.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtppp.errors import ConfigurationError


@dataclass(frozen=True, order=True)
class Coupling:
    """What layer `source` leaves behind is used by layers up to and including `last`.

    A stage may not begin at any layer in `source + 1 .. last`.
    """

    source: int
    last: int
    what: str

    def forbids(self, start: int) -> bool:
        return self.source < start <= self.last

    def __str__(self) -> str:
        return f"layers {self.source} to {self.last}: {self.what}"


@dataclass(frozen=True)
class Couplings:
    """All couplings of a model.

    Attributes:
        known: False: nobody has read this family's code for couplings, so an empty list says
            nothing.
        evidence: how it is known.
    """

    items: tuple[Coupling, ...]
    known: bool
    evidence: str

    def forbidding(self, start: int) -> Coupling | None:
        """The coupling that a stage beginning at `start` would cut."""
        return next((coupling for coupling in self.items if coupling.forbids(start)), None)

    def legal_starts(self, layers: int) -> tuple[int, ...]:
        """Layers at which a stage may begin, 0 included, in ascending order."""
        return tuple(start for start in range(layers) if self.forbidding(start) is None)


INDEX_SHARE = "the top-k indices of layer {source} are re-used (IndexShare)"

_READ_AND_UNCOUPLED = frozenset(
    {
        "deepseek_v3",
        "kimi_k2",
        "glm4_moe",
        "mimo",
        "mimo_v2",
        "mimo_v2_flash",
        "mimo_v2_pro",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
_INDEXED = frozenset({"glm_moe_dsa", "deepseek_v32", "glm4_moe_lite", "hy_v4"})


def couplings(config: Mapping[str, Any]) -> Couplings:
    """The couplings of the model that a config.json describes.

    Args:
        config: the text model's part where the file nests it.

    Raises:
        ConfigurationError: the keys that say which layers are coupled contradict themselves.
    """
    family = str(config.get("model_type", ""))
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return Couplings((), known=False, evidence="config.json has no num_hidden_layers")
    if family in _INDEXED:
        return _index_share(config, family, layers)
    if family == "deepseek_v41":
        return _published_by_sources(config, layers)
    if family in {"gemma3n_text", "gemma4_text", "gemma3n", "gemma4"}:
        return _shared_keys_and_values(config, layers)
    if family in _READ_AND_UNCOUPLED:
        return Couplings(
            (), known=True, evidence=f"{family}: layers take hidden states and residual only"
        )
    return Couplings(
        (),
        known=False,
        evidence=f"the code of {family or 'this model'} has not been read for couplings",
    )


def shared_index_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers that re-use the top-k indices of the layer before them, by vLLM's rule.

    Raises:
        ConfigurationError: `index_topk_freq` is no positive integer, or `indexer_types` of an
            hy_v4 has the wrong length.
    """
    if config.get("index_topk") is None:
        return frozenset()
    if config.get("model_type") == "hy_v4" and config.get("indexer_types") is not None:
        types = config["indexer_types"]
        if len(types) != layers:
            raise ConfigurationError(f"indexer_types has {len(types)} entries for {layers} layers")
        return frozenset(index for index, kind in enumerate(types) if kind == "shared")
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return frozenset(
            index for index in range(min(layers, len(pattern))) if pattern[index] == "S"
        )
    frequency = config.get("index_topk_freq", 1)
    offset = config.get("index_skip_topk_offset", 2)
    if not isinstance(frequency, int) or frequency < 1:
        raise ConfigurationError(f"index_topk_freq is {frequency!r}, not a positive integer")
    return frozenset(index for index in range(layers) if max(index - offset + 1, 0) % frequency)


def _groups(layers: int, members: frozenset[int]) -> list[tuple[int, int]]:
    """(source, last) of every run of `members` and the layer before it."""
    groups: list[tuple[int, int]] = []
    for layer in range(1, layers):
        if layer not in members:
            continue
        if groups and groups[-1][1] == layer - 1:
            groups[-1] = (groups[-1][0], layer)
        else:
            groups.append((layer - 1, layer))
    return groups


def _index_share(config: Mapping[str, Any], family: str, layers: int) -> Couplings:
    shared = shared_index_layers(config, layers)
    if 0 in shared:
        raise ConfigurationError("layer 0 shares the indices of a layer before it: there is none")
    items = tuple(
        Coupling(source, last, INDEX_SHARE.format(source=source))
        for source, last in _groups(layers, shared)
    )
    if not items:
        return Couplings(
            (), known=True, evidence=f"{family}: every layer has an indexer of its own, or none"
        )
    rule = (
        "index_topk_pattern"
        if config.get("index_topk_pattern") is not None
        else f"index_topk_freq {config.get('index_topk_freq', 1)}, "
        f"index_skip_topk_offset {config.get('index_skip_topk_offset', 2)}"
    )
    if family == "hy_v4" and config.get("indexer_types") is not None:
        rule = "indexer_types"
    return Couplings(items, known=True, evidence=f"{family}: {rule}")


def disagreement(config: Mapping[str, Any]) -> str:
    """What `indexer_types` says otherwise than the keys vLLM reads; "" when they agree.

    The file of GLM-5.2 has both. vLLM reads `indexer_types` of hy_v4 only; a file whose list
    differs is served by another model than the one that was trained.
    """
    types = config.get("indexer_types")
    layers = config.get("num_hidden_layers")
    if types is None or not isinstance(layers, int):
        return ""
    listed = frozenset(index for index, kind in enumerate(types) if kind == "shared")
    read = shared_index_layers(config, layers)
    differing = sorted(listed ^ read)
    if not differing:
        return ""
    return (
        f"indexer_types and index_topk_freq/index_topk_pattern disagree on layers "
        f"{', '.join(map(str, differing[:8]))}{', ...' if len(differing) > 8 else ''}; "
        "vLLM goes by the latter"
    )


def _source_groups(sources: Sequence[int], users: Sequence[int], what: str) -> list[Coupling]:
    """One coupling per source that a later layer uses: users take the nearest source below."""
    last: dict[int, int] = {}
    for user in users:
        below = [source for source in sources if source <= user]
        if below and user > max(below):
            last[max(below)] = user
    return [Coupling(source, user, what.format(source=source)) for source, user in last.items()]


def _published_by_sources(config: Mapping[str, Any], layers: int) -> Couplings:
    ratios = config.get("compress_ratios") or ()
    users = [index for index in range(min(layers, len(ratios))) if int(ratios[index]) > 0]
    items = _source_groups(
        config.get("kv_source_layer_ids") or (),
        users,
        "the compressed KV of layer {source} is used",
    )
    items += _source_groups(
        config.get("index_source_layer_ids") or (), users, "the indices of layer {source} are used"
    )
    candidates = config.get("candidate_source_layer_id", -1)
    if candidates >= 0 and config.get("candidate_topk_blocks", 0) > 0 and candidates < layers - 1:
        items.append(
            Coupling(candidates, layers - 1, f"the candidate blocks of layer {candidates} are used")
        )
    return Couplings(
        tuple(sorted(items)),
        known=True,
        evidence="deepseek_v41: kv_source_layer_ids, index_source_layer_ids, "
        "candidate_source_layer_id",
    )


def _shared_keys_and_values(config: Mapping[str, Any], layers: int) -> Couplings:
    shared = config.get("num_kv_shared_layers", 0) or 0
    kinds = config.get("layer_types")
    evidence = "num_kv_shared_layers, layer_types"
    if not shared:
        return Couplings((), known=True, evidence="num_kv_shared_layers is 0")
    if kinds is None or len(kinds) < layers:
        return Couplings((), known=False, evidence=f"{evidence}: layer_types is missing")
    first = layers - shared
    sources = {kind: index for index, kind in enumerate(kinds[:first])}
    last: dict[int, int] = {}
    for index in range(first, layers):
        if kinds[index] in sources:
            last[sources[kinds[index]]] = index
    items = tuple(
        Coupling(source, user, f"the keys and values of layer {source} are re-used")
        for source, user in sorted(last.items())
    )
    return Couplings(items, known=True, evidence=evidence)
