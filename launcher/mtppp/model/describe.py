"""The facts of a model as plain data, for `--json` and for drawing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mtppp.model.checkpoint import Checkpoint
from mtppp.model.config import ModelConfig
from mtppp.model.facts import ModelFacts
from mtppp.model.layers import Layer


def describe(
    config: ModelConfig, facts: ModelFacts, checkpoint: Checkpoint | None, cache_type: str
) -> dict[str, Any]:
    """Everything `mtppp model inspect` reports. Sizes are bytes; null is "not known".

    Args:
        checkpoint: measured sizes; None where no safetensors are at hand.
        cache_type: `--kv-cache-dtype` that cache sizes are stated for.

    Raises:
        ConfigurationError: the cache type is not known.
    """
    stack = facts.stack
    return {
        "origin": config.origin,
        "config_hash": config.digest,
        "model_type": facts.model_type,
        "architecture": facts.architecture,
        "dtype_bytes": facts.number.activation,
        "layer_count": facts.layer_count,
        "hidden_size": facts.hidden,
        "vocabulary": facts.vocabulary,
        "native_context": facts.context,
        "attention_heads": facts.heads,
        "key_value_heads": facts.key_value_heads,
        "latent": asdict(facts.latent) if facts.latent else None,
        "index_topk": facts.index_topk,
        "experts": asdict(facts.experts) if facts.experts else None,
        "quantisation": {
            "method": facts.quantisation.method,
            "bits": facts.quantisation.bits,
            "block": list(facts.quantisation.block) if facts.quantisation.block else None,
        },
        "parameters": facts.parameters,
        "bytes": facts.checkpoint_bytes,
        "measured": asdict(checkpoint) if checkpoint else None,
        "components": [asdict(part) for part in facts.components()],
        "layers": [_layer(facts, layer, cache_type) for layer in stack.layers] if stack else None,
        "mtp": {
            "count": facts.mtp_layers,
            "parameters": facts.mtp_parameters,
            "layers": [_layer(facts, layer, cache_type) for layer in stack.mtp] if stack else None,
            "drafters": [
                {"since": ".".join(map(str, entry.since)), "architecture": entry.architecture}
                for entry in facts.drafters
            ],
        },
        "cache": {
            "type": cache_type,
            "bytes_per_token": facts.cache_bytes_per_token(cache_type),
            "bytes_per_token_with_mtp": facts.cache_bytes_per_token(cache_type, with_mtp=True),
            "bytes_per_request": facts.cache_bytes_per_request(cache_type),
        },
        "couplings": {
            "known": facts.couplings.known,
            "evidence": facts.couplings.evidence,
            "groups": [asdict(coupling) for coupling in facts.couplings.items],
            "stage_starts": list(facts.couplings.legal_starts(facts.layer_count)),
        },
        "unknowns": list(facts.unknowns),
        "notes": list(facts.notes),
    }


def _layer(facts: ModelFacts, layer: Layer, cache_type: str) -> dict[str, Any]:
    activation = facts.number.activation
    return {
        "index": layer.index,
        "attention": layer.attention,
        "indexer": layer.indexer,
        "mlp": layer.mlp,
        "parameters": sum(weight.parameters for weight in layer.weights),
        "bytes": facts.layer_bytes(layer),
        "cache_bytes_per_token": layer.cache.per_token(cache_type, activation, 1),
        "cache_bytes_per_request": layer.cache.per_request(cache_type, activation, 1, 0),
    }
