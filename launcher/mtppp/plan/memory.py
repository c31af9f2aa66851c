"""What a deployment takes on every GPU, and how many tokens then fit.

Weights are summed matrix by matrix in the way vLLM spreads them (see `mtppp.model.layers`), and
with them what vLLM allocates before it loads weights and that a configuration determines. What none
determines (activations at their peak, CUDA graphs, NCCL's and the context's memory) is one
allowance, `Gpu.overhead`; the engine measures it at start-up.

How near this comes. On 8 H200 at TP8, GLM-5.3-FP8, which has GLM-5.2's shape, took 94.46 GiB of
"weights" per rank (vllm-project/recipes pull 893: vLLM 0.28.0, no drafter, the native context of
1,048,576 tokens); this module says 94.3 GiB, 0.2 % less. Only 88.5 GiB of that are weights: the
checkpoint over 8 ranks without the MTP layer is 86.8, the rest is what every rank holds whole and
the copies of kv_b_proj. 5.6 GiB are the workspace into which sparse attention unpacks an FP8
cache, which grows with max-model-len (`prefill_workspace`). What is missing are the buffers sized
by a step's tokens. The KV cache agrees exactly: the same report stored 59,763,793,920 bytes for
138,496 tokens, which is 53,940 bytes per token on each of 8 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtppp.errors import ConfigurationError
from mtppp.model.cache import element_bytes
from mtppp.model.drafters import parse_release
from mtppp.model.facts import ModelFacts
from mtppp.model.layers import Layer, Stack
from mtppp.model.weights import Ranks, Split, Weight, share, weight_bytes

GIB = 2**30
DEFAULT_UTILISATION = 0.90
DEFAULT_OVERHEAD = 5 * GIB


@dataclass(frozen=True)
class Published:
    """A measurement somebody published: GiB of "weights" per rank, as vLLM logs them."""

    source: str
    tensor: int
    pipeline: int
    release: str
    max_model_len: int
    gib: float


PUBLISHED = (
    Published(
        "vllm-project/recipes pull 893",
        tensor=8,
        pipeline=1,
        release="0.28.0",
        max_model_len=1_048_576,
        gib=94.46,
    ),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU's memory.

    Attributes:
        memory: bytes.
        utilisation: `--gpu-memory-utilization`.
        overhead: bytes for activations, CUDA graphs, NCCL and the context.
    """

    memory: int
    utilisation: float = DEFAULT_UTILISATION
    overhead: int = DEFAULT_OVERHEAD

    @property
    def budget(self) -> int:
        """Bytes for weights and KV cache."""
        return int(self.memory * self.utilisation) - self.overhead


@dataclass(frozen=True)
class Serving:
    """How the model is served, as far as memory and time depend on it.

    Attributes:
        tensor: tensor-parallel size.
        expert: ranks that whole experts are spread over; None without expert parallelism.
        drafts: `num_speculative_tokens`; 0: no drafter.
        cache_type: `--kv-cache-dtype`.
        max_num_seqs, max_num_batched_tokens, max_model_len: as vLLM's options; without a
            max_model_len, what grows with it is not counted.
        release: vLLM's, such as "0.32.0"; None: any.
    """

    tensor: int
    expert: int | None = None
    drafts: int = 0
    cache_type: str = "auto"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    release: str | None = None

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.tensor, self.expert)


@dataclass(frozen=True)
class Part:
    """Something that lies on every GPU of a stage."""

    name: str
    bytes: int


@dataclass(frozen=True)
class StageMemory:
    """One stage's GPUs; all sizes are bytes on the fullest of them.

    Attributes:
        parts: all that is resident beside the KV cache.
        replicated: what of `parts` every rank of the stage holds whole, by weight; the
            larger first.
        cache_per_token: of a request's context.
        cache_per_request: whatever its length (windows, recurrent states).
        budget: for weights and KV cache.
        longest: the largest max-model-len that would fit here, whatever the report was asked
            for; None when length takes nothing.
    """

    index: int
    first_layer: int
    last_layer: int
    parts: tuple[Part, ...]
    replicated: tuple[Part, ...]
    cache_per_token: int
    cache_per_request: int
    budget: int
    longest: int | None

    @property
    def weights(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def free(self) -> int:
        """Bytes left for the KV cache; negative when the weights do not fit."""
        return self.budget - self.weights

    @property
    def tokens(self) -> int | None:
        """Tokens that fit in the KV cache as one request; 0 when the weights alone do not fit;
        None when a token takes nothing (recurrent layers only)."""
        room = self.free - self.cache_per_request
        if room < 0:
            return 0
        return room // self.cache_per_token if self.cache_per_token else None

    def requests(self, length: int) -> float:
        """Requests of `length` tokens that fit at once."""
        each = self.cache_per_request + length * self.cache_per_token
        return max(0.0, self.free / each) if each else float("inf")


@dataclass(frozen=True)
class MemoryReport:
    """All stages. vLLM gives every stage as many cache blocks as the fullest stage has room for.

    Attributes:
        native: the longest context the model was made for.
    """

    stages: tuple[StageMemory, ...]
    native: int | None

    @property
    def fits(self) -> bool:
        return all(stage.free > 0 for stage in self.stages)

    @property
    def tightest(self) -> StageMemory:
        """The stage that limits the KV cache."""
        return min(
            self.stages,
            key=lambda stage: (stage.tokens is None, stage.tokens or 0, stage.free, stage.index),
        )

    @property
    def tokens(self) -> int | None:
        """Tokens in the KV cache; None when no layer keeps any per token."""
        return self.tightest.tokens

    @property
    def largest_max_model_len(self) -> int | None:
        """The largest that fits, up to the model's native context; None: any."""
        limits = [stage.longest for stage in self.stages if stage.longest is not None]
        if self.native is not None:
            limits.append(self.native)
        return min(limits, default=None)

    def concurrency(self, max_model_len: int) -> float:
        """Requests of full length that fit at once."""
        return min(stage.requests(max_model_len) for stage in self.stages)

    def problem(self, max_model_len: int | None) -> str:
        """Why the deployment does not fit, and what would; "" when it does."""
        full = min(self.stages, key=lambda stage: stage.free)
        if full.free <= 0:
            return (
                f"stage {full.index} (layers {full.first_layer} to {full.last_layer}) needs "
                f"{full.weights / GIB:.1f} GiB for weights on each GPU, and has "
                f"{full.budget / GIB:.1f} GiB: more GPUs, or a smaller checkpoint"
            )
        largest = self.largest_max_model_len
        if max_model_len is None or largest is None or max_model_len <= largest:
            return ""
        if self.native is not None and max_model_len > self.native:
            return f"max-model-len {max_model_len} is beyond the model's own {self.native}"
        tight = self.tightest
        return (
            f"max-model-len {max_model_len} does not fit: stage {tight.index} has "
            f"{tight.free / GIB:.1f} GiB left on each GPU, and a token takes "
            f"{tight.cache_per_token} bytes of KV cache; the largest that fits is {largest}"
        )


def memory_report(
    facts: ModelFacts, partition: Sequence[int], serving: Serving, gpus: Sequence[Gpu]
) -> MemoryReport:
    """Memory of every stage.

    Args:
        partition: layers of each stage.
        gpus: the smallest GPU of each stage.

    Raises:
        ConfigurationError: the model's layers, its quantisation or the cache type are not known,
            or the partition does not have all layers.
    """
    stack = known_stack(facts)
    if sum(partition) != len(stack.layers) or len(gpus) != len(partition):
        raise ConfigurationError(
            f"a partition of {sum(partition)} layers over {len(partition)} stages for a model of "
            f"{len(stack.layers)} layers and GPUs of {len(gpus)} stages"
        )
    stages: list[StageMemory] = []
    first = 0
    for index, count in enumerate(partition):
        layers = stack.layers[first : first + count]
        stages.append(
            _stage(
                facts,
                stack,
                layers,
                serving,
                gpus[index],
                index=index,
                is_first=index == 0,
                is_last=index == len(partition) - 1,
            )
        )
        first += count
    return MemoryReport(tuple(stages), facts.context)


def known_stack(facts: ModelFacts) -> Stack:
    """The model's layers.

    Raises:
        ConfigurationError: they, or the bytes they take, are not known.
    """
    if facts.stack is None or facts.checkpoint_bytes is None:
        raise ConfigurationError(
            "the memory of this model cannot be calculated",
            hint="give parallel.layer_partition explicitly and let the engine measure",
            details=facts.unknowns,
        )
    return facts.stack


def rank_bytes(facts: ModelFacts, weight: Weight, ranks: Ranks, prefix: str = "") -> int:
    """Bytes of `weight` on the fullest rank.

    Raises:
        ConfigurationError: the quantisation is not known.
    """
    total = weight_bytes(weight, facts.number, prefix)
    if total is None:
        raise ConfigurationError(
            f"how {facts.quantisation.method!r} stores {weight.name} is not known"
        )
    return share(weight, total, ranks)


def layer_bytes(facts: ModelFacts, layer: Layer, ranks: Ranks) -> int:
    """Resident bytes of a layer on the fullest rank, with what vLLM derives from it."""
    return sum(
        rank_bytes(facts, weight, ranks, layer.prefix) for weight in layer.weights + layer.derived
    )


def drafter_extras(facts: ModelFacts, stack: Stack, serving: Serving, *, alone: bool) -> list[Part]:
    """What the drafter adds to the last stage; `alone`: it is the first stage as well.

    The head is the target's own. The embedding is too when the stage has it; a last stage that is
    not the first loads one for the drafter.
    """
    if not serving.drafts:
        return []
    parts = [
        Part("MTP layers", sum(layer_bytes(facts, layer, serving.ranks) for layer in stack.mtp))
    ]
    if not alone and not facts.tied:
        parts.append(
            Part("embedding, for the drafter", rank_bytes(facts, stack.embedding, serving.ranks))
        )
    return parts


def index_workspace(facts: ModelFacts, layers: Sequence[Layer], serving: Serving) -> int:
    """Buffers for top-k indices (4 bytes each): one of logical ones for a step's tokens, and
    from 0.30 on one of physical ones per full indexer for a step's decode tokens."""
    if facts.index_topk is None:
        return 0
    version = parse_release(serving.release) if serving.release else None
    has_physical = version is None or version >= (0, 30, 0)
    groups = sum(layer.indexer == "full" for layer in layers) if has_physical else 0
    decode = min(serving.max_num_batched_tokens, serving.max_num_seqs * (serving.drafts + 1))
    return 4 * facts.index_topk * (serving.max_num_batched_tokens + groups * (decode + 1))


def prefill_workspace(facts: ModelFacts, serving: Serving) -> int:
    """Where FlashMLA's sparse attention unpacks an FP8 cache for prefill, to two bytes a number.

    Reserved before the weights are loaded, for `workspace_factor` requests of `max_model_len`.
    (Blackwell may choose another kernel, which has none.)
    """
    if serving.max_model_len is None:
        return 0
    factor = workspace_factor(serving.release, serving.max_model_len)
    return factor * serving.max_model_len * unpacked_row(facts, serving.cache_type)


def unpacked_row(facts: ModelFacts, cache_type: str) -> int:
    """Bytes of a token's unpacked latent; 0 where nothing is unpacked."""
    if not facts.sparse or facts.latent is None:
        return 0
    if element_bytes(cache_type, facts.number.activation) != 1:
        return 0
    return 2 * (facts.latent.key_value_rank + facts.latent.rope)


SHORT_CONTEXT = 256 * 1024


def workspace_factor(release: str | None, max_model_len: int) -> int:
    """Requests of full length that the prefill workspace holds: 5; from 0.32 on, 2 beyond 256 Ki
    tokens (`sparse_mla_prefill_workspace_factor`)."""
    version = parse_release(release) if release else None
    if version is None or version < (0, 32, 0) or max_model_len <= SHORT_CONTEXT:
        return 5
    return 2


def longest_context(
    fits: Callable[[int], int], release: str | None, *, lengthless: bool
) -> int | None:
    """The largest max-model-len that fits, which sets the size of a workspace itself.

    Args:
        fits: the most tokens that fit with a given workspace factor.
        lengthless: length takes nothing.
    """
    if lengthless:
        return None
    is_smaller_beyond = workspace_factor(release, SHORT_CONTEXT + 1) < 5
    if is_smaller_beyond and (beyond := fits(2)) > SHORT_CONTEXT:
        return beyond
    return max(0, fits(5))


def rotary_table(facts: ModelFacts) -> int:
    """Sines and cosines for every position of a latent model's native context."""
    if facts.latent is None or facts.context is None:
        return 0
    return facts.context * facts.latent.rope * facts.number.activation


def _stage(
    facts: ModelFacts,
    stack: Stack,
    layers: Sequence[Layer],
    serving: Serving,
    gpu: Gpu,
    *,
    index: int,
    is_first: bool,
    is_last: bool,
) -> StageMemory:
    ranks = serving.ranks
    parts = [Part(_counted(len(layers)), sum(layer_bytes(facts, layer, ranks) for layer in layers))]
    if is_first or (is_last and facts.tied):
        parts.append(Part("embedding", rank_bytes(facts, stack.embedding, ranks)))
    if is_last:
        parts.append(Part("final norm", rank_bytes(facts, stack.norm, ranks)))
        if not facts.tied:
            parts.append(Part("head", rank_bytes(facts, stack.head, ranks)))
        parts += drafter_extras(facts, stack, serving, alone=is_first)
    drafter = stack.mtp if is_last and serving.drafts else ()
    cached = (*layers, *drafter)
    for name, size in (
        ("rotary table", rotary_table(facts)),
        ("index workspace", index_workspace(facts, cached, serving)),
    ):
        if size:
            parts.append(Part(name, size))
    per_token = sum(
        layer.cache.per_token(serving.cache_type, facts.number.activation, serving.tensor)
        for layer in cached
    )
    per_request = sum(
        layer.cache.per_request(
            serving.cache_type, facts.number.activation, serving.tensor, serving.drafts
        )
        for layer in cached
    )
    room = gpu.budget - sum(part.bytes for part in parts) - per_request
    row = unpacked_row(facts, serving.cache_type)
    if workspace := prefill_workspace(facts, serving):
        parts.append(Part("prefill workspace", workspace))
    return StageMemory(
        index=index,
        first_layer=layers[0].index,
        last_layer=layers[-1].index,
        parts=tuple(parts),
        replicated=_replicated(facts, cached, ranks),
        cache_per_token=per_token,
        cache_per_request=per_request,
        budget=gpu.budget,
        longest=longest_context(
            lambda factor: room // (per_token + factor * row),
            serving.release,
            lengthless=per_token + row == 0,
        ),
    )


def _counted(layers: int) -> str:
    return f"{layers} layer{'s' * (layers != 1)}"


def _replicated(facts: ModelFacts, layers: Sequence[Layer], ranks: Ranks) -> tuple[Part, ...]:
    if ranks.tensor == 1:
        return ()
    sizes: dict[str, int] = {}
    for layer in layers:
        for weight in layer.weights:
            if weight.split is Split.REPLICATED:
                size = rank_bytes(facts, weight, ranks, layer.prefix)
                sizes[weight.name] = sizes.get(weight.name, 0) + size
    return tuple(
        Part(name, size)
        for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    )
