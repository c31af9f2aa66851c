"""Layers of the families mtppp knows, weight by weight.

Shapes and splits are those of vLLM's own classes (`model_executor/models/`, `models/deepseek_v32/`
from 0.29); which class that is stands at each builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtppp.model.cache import Cache, HeadCache, LatentCache, StateCache
from mtppp.model.couplings import shared_index_layers
from mtppp.model.weights import Axis, Split, Storage, Weight, bytes_of_type

ATTENTIONS = ("mla", "full", "sliding", "linear")


class MissingKey(Exception):
    """config.json lacks a key without which the layer's shape is unknown."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        index: its number in the checkpoint; MTP layers follow the last layer.
        attention: one of `ATTENTIONS`.
        indexer: "full": picks the tokens to attend to; "shared": uses the pick of the nearest
            full layer before it; None: attends to all.
        mlp: "dense" or "moe".
        weights: as the checkpoint has them.
        derived: what vLLM makes of them at load and keeps beside them.
        prefix: module path of the layer in the checkpoint.
    """

    index: int
    attention: str
    indexer: str | None
    mlp: str
    weights: tuple[Weight, ...]
    derived: tuple[Weight, ...]
    cache: Cache
    prefix: str


@dataclass(frozen=True)
class Stack:
    """All layers of a model, and what stands before and after them."""

    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...]
    embedding: Weight
    head: Weight
    norm: Weight


@dataclass(frozen=True)
class Fields:
    """A config.json's keys with types.

    `values` is the text model's part; `outer` the whole file.
    """

    values: Mapping[str, Any]
    outer: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise MissingKey(key)
        return value

    def optional(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.values.get(key, default))

    def items(self, key: str) -> tuple[Any, ...] | None:
        value = self.values.get(key)
        return tuple(value) if isinstance(value, list) else None

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else default

    @property
    def dtype(self) -> str | None:
        for source in (self.values, self.outer):
            for key in ("dtype", "torch_dtype"):
                if isinstance(source.get(key), str):
                    return str(source[key])
        return None


def vector(name: str, length: int, storage: Storage = Storage.ACTIVATION) -> Weight:
    return Weight(name, length, 1, storage=storage)


def column(name: str, rows: int, columns: int, units: int) -> Weight:
    """A quantisable matrix cut along its outputs."""
    return Weight(name, rows, columns, Split.TENSOR, Storage.QUANTISED, units)


def row(name: str, rows: int, columns: int, units: int) -> Weight:
    """A quantisable matrix cut along its inputs."""
    return Weight(name, rows, columns, Split.TENSOR, Storage.QUANTISED, units, cut=Axis.INPUTS)


def whole(name: str, rows: int, columns: int, storage: Storage = Storage.QUANTISED) -> Weight:
    return Weight(name, rows, columns, Split.REPLICATED, storage)


def padded_vocabulary(size: int) -> int:
    """Rows vLLM gives the embedding and the head: a multiple of 64."""
    return -(-size // 64) * 64


def _vocabulary_weight(name: str, fields: Fields) -> Weight:
    rows = fields.integer("vocab_size")
    return Weight(
        name,
        rows,
        fields.integer("hidden_size"),
        Split.TENSOR,
        Storage.ACTIVATION,
        units=padded_vocabulary(rows),
    )


def _mlp(name: str, hidden: int, width: int) -> tuple[Weight, ...]:
    return (
        column(f"{name}.gate_proj", width, hidden, width),
        column(f"{name}.up_proj", width, hidden, width),
        row(f"{name}.down_proj", hidden, width, width),
    )


def _experts(hidden: int, width: int, count: int) -> tuple[Weight, ...]:
    return tuple(
        replace(weight, split=Split.EXPERT, copies=count)
        for weight in _mlp("mlp.experts", hidden, width)
    )


# --- DeepSeek V3 and what descends from it -----------------------------------------------------


def _latent_attention(fields: Fields, *, own_indexer: bool) -> tuple[Weight, ...]:
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    latent = fields.integer("kv_lora_rank")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    value = fields.integer("v_head_dim")
    query_rank = fields.optional("q_lora_rank")
    query = heads * (nope + rope)
    weights: list[Weight] = []
    if query_rank is None:
        weights.append(column("self_attn.q_proj", query, hidden, heads))
    else:
        weights += [
            whole("self_attn.q_a_proj", query_rank, hidden),
            vector("self_attn.q_a_layernorm", query_rank),
            column("self_attn.q_b_proj", query, query_rank, heads),
        ]
    weights += [
        whole("self_attn.kv_a_proj_with_mqa", latent + rope, hidden),
        vector("self_attn.kv_a_layernorm", latent),
        column("self_attn.kv_b_proj", heads * (nope + value), latent, heads),
        row("self_attn.o_proj", hidden, heads * value, heads),
    ]
    if own_indexer:
        index_heads, width = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        if query_rank is None:
            raise MissingKey("q_lora_rank")
        weights += [
            whole("self_attn.indexer.wq_b", index_heads * width, query_rank),
            whole("self_attn.indexer.wk", width, hidden, Storage.ACTIVATION),
            whole("self_attn.indexer.weights_proj", index_heads, hidden, Storage.ACTIVATION),
            vector("self_attn.indexer.k_norm.weight", width, Storage.FLOAT32),
            vector("self_attn.indexer.k_norm.bias", width, Storage.FLOAT32),
        ]
    return tuple(weights)


def _latent_layer(fields: Fields, index: int, *, is_moe: bool, is_mtp: bool) -> Layer:
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    latent = fields.integer("kv_lora_rank")
    sparse = fields.optional("index_topk") is not None
    # The MTP layer always has an indexer of its own.
    shared = sparse and not is_mtp and index in shared_index_layers(fields.values, index + 1)
    own_indexer = sparse and not shared
    weights = _latent_attention(fields, own_indexer=own_indexer)
    weights += (vector("input_layernorm", hidden), vector("post_attention_layernorm", hidden))
    if is_moe:
        weights += _routed(fields)
    else:
        weights += _mlp("mlp", hidden, fields.integer("intermediate_size"))
    if is_mtp:
        weights += _mtp_projection(hidden)
    # vLLM splits kv_b_proj into its key and value parts, in the model's own type, and keeps all
    # three: prefill uses the one, decode the others.
    per_head = fields.integer("qk_nope_head_dim") + fields.integer("v_head_dim")
    absorbed = Weight(
        "self_attn.kv_b_proj (absorbed)", heads * per_head, latent, Split.TENSOR, units=heads
    )
    indexer = ("shared" if shared else "full") if sparse else None
    return Layer(
        index=index,
        attention="mla",
        indexer=indexer,
        mlp="moe" if is_moe else "dense",
        weights=weights,
        derived=(absorbed,),
        cache=LatentCache(
            rank=latent,
            rope=fields.integer("qk_rope_head_dim"),
            sparse=sparse,
            indexer=fields.integer("index_head_dim") if own_indexer else None,
        ),
        prefix=f"model.layers.{index}",
    )


def _routed(fields: Fields) -> tuple[Weight, ...]:
    """`DeepseekV2MoE`, `Glm4MoE`: a router with a bias per expert, experts, shared experts."""
    hidden = fields.integer("hidden_size")
    experts = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    weights: tuple[Weight, ...] = (whole("mlp.gate", experts, hidden, Storage.ACTIVATION),)
    if fields.text("topk_method", "noaux_tc") == "noaux_tc":
        weights += (vector("mlp.gate.e_score_correction_bias", experts, Storage.FLOAT32),)
    weights += _experts(hidden, width, experts)
    shared = fields.optional("n_shared_experts")
    if shared:
        weights += _mlp("mlp.shared_experts", hidden, width * shared)
    return weights


def _mtp_projection(hidden: int) -> tuple[Weight, ...]:
    """What an MTP layer of the DeepSeek and GLM families has beside a decoder layer.

    The checkpoint may also hold a copy of the embedding and of the head under the layer; those
    are the model's own and are not counted again.
    """
    return (
        whole("eh_proj", hidden, 2 * hidden, Storage.ACTIVATION),
        vector("enorm", hidden),
        vector("hnorm", hidden),
        vector("shared_head.norm", hidden),
    )


def _is_moe(fields: Fields, index: int) -> bool:
    """The rule of `DeepseekV2DecoderLayer`; `mlp_layer_types` where the first key is absent."""
    if fields.optional("n_routed_experts") is None:
        return False
    kinds = fields.items("mlp_layer_types")
    if fields.optional("first_k_dense_replace") is None and kinds is not None:
        return bool(kinds[index] == "sparse")
    dense = fields.integer("first_k_dense_replace")
    frequency = fields.values.get("moe_layer_freq", 1)
    return index >= dense and index % int(frequency) == 0


def deepseek(fields: Fields) -> Stack:
    """deepseek_v3, deepseek_v32, glm_moe_dsa, glm4_moe_lite, kimi_k2: latent attention (MLA)."""
    count = fields.integer("num_hidden_layers")
    mtp = fields.integer("num_nextn_predict_layers", 0)
    return _stack(
        fields,
        layers=tuple(
            _latent_layer(fields, index, is_moe=_is_moe(fields, index), is_mtp=False)
            for index in range(count)
        ),
        mtp=tuple(
            _latent_layer(fields, count + number, is_moe=True, is_mtp=True) for number in range(mtp)
        ),
    )


def _stack(fields: Fields, *, layers: tuple[Layer, ...], mtp: tuple[Layer, ...]) -> Stack:
    return Stack(
        layers=layers,
        mtp=mtp,
        embedding=_vocabulary_weight("model.embed_tokens", fields),
        head=_vocabulary_weight("lm_head", fields),
        norm=vector("model.norm", fields.integer("hidden_size")),
    )


# --- attention over key/value heads ------------------------------------------------------------


def _heads_attention(
    *,
    hidden: int,
    heads: int,
    key_value_heads: int,
    key: int,
    value: int,
    bias: bool,
    gated: bool = False,
    norms: bool = False,
    sinks: bool = False,
) -> tuple[Weight, ...]:
    """Grouped-query attention; `gated`: the query projection carries an output gate too."""
    query = heads * key * (2 if gated else 1)
    keys, values = key_value_heads * key, key_value_heads * value
    weights = [
        column("self_attn.q_proj", query, hidden, heads),
        column("self_attn.k_proj", keys, hidden, key_value_heads),
        column("self_attn.v_proj", values, hidden, key_value_heads),
        row("self_attn.o_proj", hidden, heads * value, heads),
    ]
    if bias:
        weights += [
            Weight("self_attn.q_proj.bias", query, 1, Split.TENSOR, units=heads),
            Weight("self_attn.k_proj.bias", keys, 1, Split.TENSOR, units=key_value_heads),
            Weight("self_attn.v_proj.bias", values, 1, Split.TENSOR, units=key_value_heads),
        ]
    if norms:
        weights += [vector("self_attn.q_norm", key), vector("self_attn.k_norm", key)]
    if sinks:
        weights.append(Weight("self_attn.attention_sink_bias", heads, 1, Split.TENSOR, units=heads))
    return tuple(weights)


def _head_dim(fields: Fields) -> int:
    explicit = fields.optional("head_dim")
    if explicit is not None:
        return explicit
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def glm4_moe(fields: Fields) -> Stack:
    """GLM-4.5, 4.5-Air, 4.6, 4.7: `Glm4MoeDecoderLayer`, `Glm4MoeMTP`."""
    count = fields.integer("num_hidden_layers")
    mtp = fields.integer("num_nextn_predict_layers", 0)

    def layer(index: int, *, is_moe: bool, is_mtp: bool) -> Layer:
        hidden = fields.integer("hidden_size")
        head_dim = _head_dim(fields)
        key_value_heads = fields.integer("num_key_value_heads")
        weights = _heads_attention(
            hidden=hidden,
            heads=fields.integer("num_attention_heads"),
            key_value_heads=key_value_heads,
            key=head_dim,
            value=head_dim,
            bias=fields.flag("attention_bias"),
            norms=fields.flag("use_qk_norm"),
        )
        weights += (vector("input_layernorm", hidden), vector("post_attention_layernorm", hidden))
        weights += (
            _routed(fields) if is_moe else _mlp("mlp", hidden, fields.integer("intermediate_size"))
        )
        if is_mtp:
            weights += _mtp_projection(hidden)
        return Layer(
            index=index,
            attention="full",
            indexer=None,
            mlp="moe" if is_moe else "dense",
            weights=_wide_router(weights),
            derived=(),
            cache=HeadCache(key_value_heads, head_dim, head_dim),
            prefix=f"model.layers.{index}",
        )

    return _stack(
        fields,
        layers=tuple(
            layer(index, is_moe=_is_moe(fields, index), is_mtp=False) for index in range(count)
        ),
        mtp=tuple(layer(count + number, is_moe=True, is_mtp=True) for number in range(mtp)),
    )


def _wide_router(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The router in float32, as `Glm4MoE` and `MiMoV2MoE` keep it."""
    return tuple(
        replace(weight, storage=Storage.FLOAT32) if weight.name == "mlp.gate" else weight
        for weight in weights
    )


def mimo(fields: Fields) -> Stack:
    """MiMo-7B: `Qwen2DecoderLayer` with biases on q, k, v; `MiMoMTP`."""
    count = fields.integer("num_hidden_layers")
    hidden = fields.integer("hidden_size")
    head_dim = _head_dim(fields)
    key_value_heads = fields.integer("num_key_value_heads")

    def layer(index: int, prefix: str, extra: tuple[Weight, ...]) -> Layer:
        weights = _heads_attention(
            hidden=hidden,
            heads=fields.integer("num_attention_heads"),
            key_value_heads=key_value_heads,
            key=head_dim,
            value=head_dim,
            # Qwen2 has them whatever the file says; MiMo's says the same.
            bias=True,
        )
        weights += (vector("input_layernorm", hidden), vector("post_attention_layernorm", hidden))
        weights += _mlp("mlp", hidden, fields.integer("intermediate_size"))
        return Layer(
            index=index,
            attention="full",
            indexer=None,
            mlp="dense",
            weights=weights + extra,
            derived=(),
            cache=HeadCache(key_value_heads, head_dim, head_dim),
            prefix=prefix,
        )

    projection = (
        whole("input_proj", hidden, 2 * hidden, Storage.ACTIVATION),
        vector("token_layernorm", hidden),
        vector("hidden_layernorm", hidden),
        vector("final_layernorm", hidden),
    )
    return _stack(
        fields,
        layers=tuple(layer(index, f"model.layers.{index}", ()) for index in range(count)),
        mtp=tuple(
            layer(count + number, f"model.mtp_layers.{number}", projection)
            for number in range(fields.integer("num_nextn_predict_layers", 0))
        ),
    )


def mimo_v2(fields: Fields) -> Stack:
    """MiMo-V2 Flash and Pro: `MiMoV2FlashDecoderLayer`; of the MTP layers vLLM loads the first.

    Sliding and full layers differ in heads and head sizes. The MTP layer slides and is dense.
    """
    count = fields.integer("num_hidden_layers")
    hidden = fields.integer("hidden_size")
    pattern = fields.items("hybrid_layer_pattern")
    if pattern is None or len(pattern) < count:
        raise MissingKey("hybrid_layer_pattern")
    moe = fields.items("moe_layer_freq")
    window = fields.optional("sliding_window_size") or fields.integer("sliding_window")

    def layer(index: int, *, slides: bool, is_moe: bool, prefix: str) -> Layer:
        swa = "swa_" if slides else ""
        key = fields.integer(f"{swa}head_dim")
        value = fields.integer(f"{swa}v_head_dim", key)
        key_value_heads = fields.integer(f"{swa}num_key_value_heads")
        weights = _heads_attention(
            hidden=hidden,
            heads=fields.integer(f"{swa}num_attention_heads"),
            key_value_heads=key_value_heads,
            key=key,
            value=value,
            bias=fields.flag("attention_bias"),
            sinks=slides and fields.flag("add_swa_attention_sink_bias"),
        )
        weights += (vector("input_layernorm", hidden), vector("post_attention_layernorm", hidden))
        weights += (
            _routed(fields) if is_moe else _mlp("mlp", hidden, fields.integer("intermediate_size"))
        )
        return Layer(
            index=index,
            attention="sliding" if slides else "full",
            indexer=None,
            mlp="moe" if is_moe else "dense",
            weights=_wide_router(weights),
            derived=(),
            cache=HeadCache(key_value_heads, key, value, window if slides else None),
            prefix=prefix,
        )

    drafter = layer(count, slides=True, is_moe=False, prefix="model.mtp.layers.0")
    drafter = replace(
        drafter,
        weights=(
            *(
                # vLLM keeps the drafter's output projection unquantised.
                replace(weight, storage=Storage.ACTIVATION)
                if weight.name == "self_attn.o_proj"
                else weight
                for weight in drafter.weights
            ),
            whole("eh_proj", hidden, 2 * hidden, Storage.ACTIVATION),
            vector("enorm", hidden),
            vector("hnorm", hidden),
            vector("final_layernorm", hidden),
        ),
    )
    return _stack(
        fields,
        layers=tuple(
            layer(
                index,
                slides=pattern[index] == 1,
                is_moe=bool(moe is not None and moe[index]),
                prefix=f"model.layers.{index}",
            )
            for index in range(count)
        ),
        mtp=(drafter,),
    )


# --- Qwen with linear attention ----------------------------------------------------------------


def _layer_kinds(fields: Fields, count: int) -> tuple[str, ...]:
    kinds = fields.items("layer_types")
    if kinds is not None:
        return tuple(str(kind) for kind in kinds)
    every = fields.integer("full_attention_interval", 4)
    return tuple(
        "full_attention" if (index + 1) % every == 0 else "linear_attention"
        for index in range(count)
    )


def _linear_attention(fields: Fields, activation: int) -> tuple[tuple[Weight, ...], StateCache]:
    """`QwenGatedDeltaNetAttention`."""
    hidden = fields.integer("hidden_size")
    key_heads, value_heads = (
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_num_value_heads"),
    )
    key, value = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim")
    keys, values = key_heads * key, value_heads * value
    weights = (
        column("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden, key_heads),
        # No block-quantised kernel takes so few rows: vLLM keeps it as the model's own type.
        Weight("linear_attn.in_proj_ba", 2 * value_heads, hidden, Split.TENSOR, units=value_heads),
        Weight("linear_attn.conv1d", 2 * keys + values, kernel, Split.TENSOR, units=key_heads),
        Weight("linear_attn.dt_bias", value_heads, 1, Split.TENSOR, units=value_heads),
        Weight(
            "linear_attn.A_log", value_heads, 1, Split.TENSOR, Storage.FLOAT32, units=value_heads
        ),
        vector("linear_attn.norm", value),
        row("linear_attn.out_proj", hidden, values, value_heads),
    )
    state_type = fields.text("mamba_ssm_dtype", "")
    state = bytes_of_type(state_type) if state_type else activation
    return weights, StateCache(key_heads, value_heads, key, value, kernel, state)


def _qwen_experts(fields: Fields) -> tuple[Weight, ...]:
    """`Qwen3NextSparseMoeBlock`."""
    hidden = fields.integer("hidden_size")
    experts = fields.integer("num_experts")
    weights = (
        whole("mlp.gate", experts, hidden, Storage.ACTIVATION),
        *_experts(hidden, fields.integer("moe_intermediate_size"), experts),
        whole("mlp.shared_expert_gate", 1, hidden, Storage.ACTIVATION),
    )
    shared = fields.integer("shared_expert_intermediate_size", 0)
    return weights + (_mlp("mlp.shared_expert", hidden, shared) if shared else ())


def qwen_hybrid(fields: Fields) -> Stack:
    """Qwen3-Next, Qwen3.5 dense and MoE: three linear layers to one of full attention."""
    count = fields.integer("num_hidden_layers")
    hidden = fields.integer("hidden_size")
    activation = bytes_of_type(fields.dtype or "bfloat16")
    kinds = _layer_kinds(fields, count)
    experts = fields.optional("num_experts") or 0
    step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.items("mlp_only_layers") or ()

    def layer(index: int, kind: str, *, prefix: str, extra: tuple[Weight, ...]) -> Layer:
        is_moe = bool(experts) and index not in dense_layers and (index + 1) % step == 0
        weights: tuple[Weight, ...]
        cache: Cache
        if kind == "linear_attention":
            weights, cache = _linear_attention(fields, activation)
        else:
            head_dim = _head_dim(fields)
            key_value_heads = fields.integer("num_key_value_heads")
            weights = _heads_attention(
                hidden=hidden,
                heads=fields.integer("num_attention_heads"),
                key_value_heads=key_value_heads,
                key=head_dim,
                value=head_dim,
                bias=fields.flag("attention_bias") or fields.flag("qkv_bias"),
                gated=fields.flag("attn_output_gate", True),
                norms=True,
            )
            cache = HeadCache(key_value_heads, head_dim, head_dim)
        weights += (vector("input_layernorm", hidden), vector("post_attention_layernorm", hidden))
        weights += (
            _qwen_experts(fields)
            if is_moe
            else _mlp("mlp", hidden, fields.integer("intermediate_size"))
        )
        return Layer(
            index=index,
            attention="linear" if kind == "linear_attention" else "full",
            indexer=None,
            mlp="moe" if is_moe else "dense",
            weights=weights + extra,
            derived=(),
            cache=cache,
            prefix=prefix,
        )

    projection = (
        column("fc", hidden, 2 * hidden, hidden),
        vector("pre_fc_norm_embedding", hidden),
        vector("pre_fc_norm_hidden", hidden),
        vector("norm", hidden),
    )
    # Qwen3-Next's file does not say how many MTP layers there are; vLLM takes one.
    is_next = fields.text("model_type", "") == "qwen3_next"
    mtp = (
        fields.integer("num_nextn_predict_layers", 1)
        if is_next
        else fields.integer("mtp_num_hidden_layers", 0)
    )
    return _stack(
        fields,
        layers=tuple(
            layer(index, kinds[index], prefix=f"model.layers.{index}", extra=())
            for index in range(count)
        ),
        mtp=tuple(
            layer(
                count + number,
                "full_attention",
                prefix=f"mtp.layers.{number}",
                # One projection, whatever the number of layers behind it.
                extra=projection if number == 0 else (),
            )
            for number in range(mtp)
        ),
    )


FAMILIES: Mapping[str, Callable[[Fields], Stack]] = {
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek,
    "kimi_k2": deepseek,
    "glm_moe_dsa": deepseek,
    "glm4_moe_lite": deepseek,
    "glm4_moe": glm4_moe,
    "mimo": mimo,
    "mimo_v2": mimo_v2,
    "mimo_v2_flash": mimo_v2,
    "mimo_v2_pro": mimo_v2,
    "qwen3_next": qwen_hybrid,
    "qwen3_5": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
}
"""Builders by `model_type`."""
