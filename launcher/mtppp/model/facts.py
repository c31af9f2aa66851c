"""What a model is, from its config.json alone.

Nothing here is a guess: what the file does not say, or what mtppp has no builder for, is None and
stands in `unknowns` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtppp.errors import ConfigurationError
from mtppp.model.couplings import Couplings, couplings, disagreement
from mtppp.model.drafters import Drafter, drafters
from mtppp.model.layers import FAMILIES, Fields, Layer, MissingKey, Stack
from mtppp.model.weights import (
    Number,
    Quantisation,
    Weight,
    bytes_of_type,
    parameters,
    weight_bytes,
)


@dataclass(frozen=True)
class Experts:
    """Routed experts of a MoE layer.

    Attributes:
        count: routed experts.
        chosen: per token.
        shared: run for every token.
        width: of one expert (`moe_intermediate_size`).
    """

    count: int
    chosen: int | None
    shared: int | None
    width: int | None


@dataclass(frozen=True)
class Latent:
    """MLA's ranks and head sizes."""

    query_rank: int | None
    key_value_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Component:
    """Part of a model: parameters, and bytes in the checkpoint (None: quantisation unknown)."""

    name: str
    parameters: int
    bytes: int | None


@dataclass(frozen=True)
class ModelFacts:
    """A model as its config.json describes it.

    Attributes:
        model_type: of the text model.
        architecture: the first of `architectures`; "" without one.
        layer_count: `num_hidden_layers`; MTP layers are not among them.
        mtp_layers: what the file says the checkpoint holds; None when it does not say.
        context: longest context the model was made for, in tokens.
        number: bytes per stored number.
        stack: layers weight by weight; None when the family is not known or a key is missing.
        tied: the head is the embedding.
        index_topk: tokens an indexer picks per query (DSA); None: attention over all.
        unknowns: what could not be established, one sentence each.
        notes: what is odd about the file.
    """

    model_type: str
    architecture: str
    layer_count: int
    mtp_layers: int | None
    hidden: int | None
    vocabulary: int | None
    context: int | None
    heads: int | None
    key_value_heads: int | None
    experts: Experts | None
    latent: Latent | None
    number: Number
    stack: Stack | None
    tied: bool
    index_topk: int | None
    couplings: Couplings
    drafters: tuple[Drafter, ...]
    unknowns: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sparse(self) -> bool:
        """DSA: attention over the tokens that an indexer picks."""
        return self.index_topk is not None

    @property
    def quantisation(self) -> Quantisation:
        return self.number.quantisation

    @property
    def parameters(self) -> int | None:
        """All parameters, the MTP layers' included, each counted once."""
        if self.stack is None:
            return None
        return sum(component.parameters for component in self.components())

    @property
    def mtp_parameters(self) -> int | None:
        if self.stack is None:
            return None
        return sum(parameters(layer.weights) for layer in self.stack.mtp)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of the checkpoint's tensors, each counted once."""
        if self.stack is None:
            return None
        sizes = [component.bytes for component in self.components()]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def components(self) -> tuple[Component, ...]:
        """Embedding, layers, norm, head, MTP layers; empty without a stack."""
        if self.stack is None:
            return ()
        stack = self.stack
        parts = [self._single(stack.embedding)]
        parts += [self._layer(f"layer {layer.index}", layer) for layer in stack.layers]
        parts.append(self._single(stack.norm))
        if not self.tied:
            parts.append(self._single(stack.head))
        parts += [self._layer(f"MTP layer {layer.index}", layer) for layer in stack.mtp]
        return tuple(parts)

    def layer_bytes(self, layer: Layer) -> int | None:
        return self._layer("", layer).bytes

    def _single(self, weight: Weight) -> Component:
        return Component(weight.name, weight.parameters, weight_bytes(weight, self.number))

    def _layer(self, name: str, layer: Layer) -> Component:
        sizes = [weight_bytes(weight, self.number, layer.prefix) for weight in layer.weights]
        known = [size for size in sizes if size is not None]
        return Component(
            name,
            parameters(layer.weights),
            sum(known) if len(known) == len(sizes) else None,
        )

    def cache_bytes_per_token(
        self, cache_type: str = "auto", *, tensor: int = 1, with_mtp: bool = False
    ) -> int | None:
        """KV cache bytes per token and GPU over all layers; None without a stack.

        Sliding and linear layers take none per token: see `cache_bytes_per_request`.

        Raises:
            ConfigurationError: the cache type is not known.
        """
        if self.stack is None:
            return None
        layers = self.stack.layers + (self.stack.mtp if with_mtp else ())
        return sum(
            layer.cache.per_token(cache_type, self.number.activation, tensor) for layer in layers
        )

    def cache_bytes_per_request(
        self,
        cache_type: str = "auto",
        *,
        tensor: int = 1,
        drafts: int = 0,
        with_mtp: bool = False,
    ) -> int | None:
        """Bytes a request takes on a GPU however long it is; None without a stack."""
        if self.stack is None:
            return None
        layers = self.stack.layers + (self.stack.mtp if with_mtp else ())
        return sum(
            layer.cache.per_request(cache_type, self.number.activation, tensor, drafts)
            for layer in layers
        )


def read_facts(config: Mapping[str, Any]) -> ModelFacts:
    """The facts that a parsed config.json states.

    Raises:
        ConfigurationError: it is no model's configuration, or contradicts itself.
    """
    text = _text_part(config)
    fields = Fields(text, config)
    layer_count = text.get("num_hidden_layers")
    if not isinstance(layer_count, int) or layer_count < 1:
        raise ConfigurationError(
            "config.json has no num_hidden_layers",
            hint="is this a language model's config.json?",
        )
    model_type = str(text.get("model_type", ""))
    architecture = _architecture(config)
    unknowns: list[str] = []
    quantisation = read_quantisation(config, text)
    if quantisation.bits is None and quantisation.method != "none":
        unknowns.append(
            f"bytes of the weights: how {quantisation.method!r} stores them is not read here"
        )
    stack = _stack(model_type, fields, unknowns)
    known_couplings = couplings(text)
    if not known_couplings.known:
        unknowns.append(f"couplings across layers: {known_couplings.evidence}")
    if text is not config and "vision_config" in config:
        unknowns.append("the vision tower: it is not counted in parameters, bytes or memory")
    if fields.dtype is None:
        unknowns.append("the model's number type: no dtype in the file, bfloat16 assumed")
    known_drafters = drafters(str(config.get("model_type", model_type)), architecture)
    mtp_layers = len(stack.mtp) if stack is not None else _declared_mtp_layers(fields)
    if mtp_layers and not known_drafters:
        unknowns.append(f"the drafter: mtppp knows none for {model_type or 'this model'}")
    oddity = disagreement(text)
    return ModelFacts(
        model_type=model_type,
        architecture=architecture,
        layer_count=layer_count,
        mtp_layers=mtp_layers,
        hidden=fields.optional("hidden_size"),
        vocabulary=fields.optional("vocab_size"),
        context=fields.optional("max_position_embeddings"),
        heads=fields.optional("num_attention_heads"),
        key_value_heads=fields.optional("num_key_value_heads"),
        experts=_experts(fields),
        latent=_latent(fields),
        number=Number(bytes_of_type(fields.dtype or "bfloat16"), quantisation),
        stack=stack,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        index_topk=fields.optional("index_topk"),
        couplings=known_couplings,
        drafters=known_drafters if mtp_layers else (),
        unknowns=tuple(unknowns),
        notes=(oddity,) if oddity else (),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _stack(model_type: str, fields: Fields, unknowns: list[str]) -> Stack | None:
    build = FAMILIES.get(model_type)
    if build is None:
        unknowns.append(
            f"weights and cache per layer: mtppp does not know the family "
            f"{model_type or '(no model_type in the file)'}"
        )
        return None
    try:
        return build(fields)
    except MissingKey as missing:
        unknowns.append(f"weights and cache per layer: config.json has no usable {missing}")
        return None


def _declared_mtp_layers(fields: Fields) -> int | None:
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"):
        count = fields.optional(key)
        if count is not None:
            return count
    return None


def _experts(fields: Fields) -> Experts | None:
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        count = fields.optional(key)
        if count:
            shared = fields.optional("n_shared_experts")
            if shared is None and fields.optional("shared_expert_intermediate_size"):
                shared = 1
            return Experts(
                count,
                fields.optional("num_experts_per_tok"),
                shared,
                fields.optional("moe_intermediate_size"),
            )
    return None


def _latent(fields: Fields) -> Latent | None:
    try:
        return Latent(
            fields.optional("q_lora_rank"),
            fields.integer("kv_lora_rank"),
            fields.integer("qk_nope_head_dim"),
            fields.integer("qk_rope_head_dim"),
            fields.integer("v_head_dim"),
        )
    except MissingKey:
        return None


def read_quantisation(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantisation:
    """How the file says the weights are stored. Only FP8 is read in full."""
    section = config.get("quantization_config") or text.get("quantization_config")
    if not isinstance(section, Mapping):
        return Quantisation()
    method = str(section.get("quant_method", "unknown"))
    skipped = section.get("modules_to_not_convert") or section.get("ignored_layers") or ()
    if method != "fp8":
        return Quantisation(method=method, skipped=tuple(skipped))
    block = section.get("weight_block_size")
    return Quantisation(
        method=method,
        bits=8,
        block=(int(block[0]), int(block[1])) if block else None,
        skipped=tuple(skipped),
    )
