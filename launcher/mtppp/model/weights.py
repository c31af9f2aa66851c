"""One weight of a model: its shape, how it is stored, and how vLLM spreads it over GPUs.

Every size that mtppp states (parameters, checkpoint bytes, bytes per GPU) is a sum over these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mtppp.errors import ConfigurationError


class Split(StrEnum):
    """How a weight is spread over the ranks of one pipeline stage."""

    TENSOR = "tensor"
    """Cut over the tensor-parallel ranks along the axis `Weight.cut` of `Weight.units` pieces."""
    EXPERT = "expert"
    """One matrix per routed expert: each cut over the ranks, or, with expert parallelism, whole
    experts spread over them."""
    REPLICATED = "replicated"
    """Whole on every rank."""


class Axis(StrEnum):
    """The axis a weight is cut along: vLLM's column- and row-parallel layers."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


class Storage(StrEnum):
    """What numbers a weight is kept in."""

    ACTIVATION = "activation"
    """The model's own type, whatever the quantisation (embeddings, norms, routers)."""
    QUANTISED = "quantised"
    """The checkpoint's quantisation where it has one, else the model's type."""
    FLOAT32 = "float32"


@dataclass(frozen=True)
class Weight:
    """A weight, or equal weights of `copies` experts.

    Attributes:
        name: module path within the layer, as in the checkpoint (`self_attn.q_a_proj`).
        rows: output features; the length of a vector.
        columns: input features; 1 for a vector.
        units: pieces the cut axis has: heads, key/value heads, channels. With fewer pieces than
            ranks each rank holds one piece, so pieces are repeated (key/value heads under a
            wide TP).
        copies: routed experts; 1 otherwise.
    """

    name: str
    rows: int
    columns: int
    split: Split = Split.REPLICATED
    storage: Storage = Storage.ACTIVATION
    units: int = 1
    copies: int = 1
    cut: Axis = Axis.OUTPUTS

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.copies


@dataclass(frozen=True)
class Ranks:
    """The ranks one pipeline stage's weights are spread over.

    Attributes:
        tensor: tensor-parallel size.
        expert: ranks that whole experts are spread over (TP x DP with `--enable-expert-parallel`);
            None: experts are cut like any other matrix.
    """

    tensor: int = 1
    expert: int | None = None


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's linear layers are stored.

    Attributes:
        method: `quant_method` of config.json; "none" without one.
        bits: per stored weight; None when mtppp does not know.
        block: rows and columns that share one float32 scale; None for one scale per matrix or
            when `bits` is unknown.
        skipped: modules the checkpoint left in the model's own type.
    """

    method: str = "none"
    bits: int | None = None
    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Whether `module` (`model.layers.3.mlp.gate_proj`) is stored quantised.

        An entry names a module or a container of modules, as vLLM compares them by default.
        """
        if self.method == "none":
            return False
        return not any(module == entry or module.startswith(entry + ".") for entry in self.skipped)


@dataclass(frozen=True)
class Number:
    """Bytes per stored number.

    Attributes:
        activation: bytes of the model's own type (2 for bfloat16).
        quantisation: of the checkpoint.
    """

    activation: int
    quantisation: Quantisation


def weight_bytes(weight: Weight, number: Number, prefix: str = "") -> int | None:
    """Bytes of the whole weight, its scales included; None when the quantisation is unknown.

    Args:
        prefix: module path of what contains the weight, to find it in the list of modules that
            the checkpoint left unquantised.
    """
    if weight.storage is Storage.FLOAT32:
        return weight.parameters * 4
    quantisation = number.quantisation
    module = f"{prefix}.{weight.name}" if prefix else weight.name
    if weight.storage is Storage.ACTIVATION or not quantisation.covers(module):
        return weight.parameters * number.activation
    if quantisation.bits is None:
        return None
    return weight.parameters * quantisation.bits // 8 + weight.copies * 4 * scales(
        weight, quantisation
    )


def scales(weight: Weight, quantisation: Quantisation) -> int:
    """float32 scales that one copy of the weight carries."""
    if quantisation.block is None:
        return 1
    rows, columns = quantisation.block
    return -(-weight.rows // rows) * -(-weight.columns // columns)


def share(weight: Weight, total: int, ranks: Ranks) -> int:
    """What the fullest rank holds of `total` bytes (or parameters) of `weight`, rounded up."""
    if weight.split is Split.REPLICATED:
        return total
    if weight.split is Split.EXPERT and ranks.expert is not None:
        return -(-total * -(-weight.copies // ranks.expert) // weight.copies)
    return -(-total * -(-weight.units // ranks.tensor) // weight.units)


def parameters(weights: Iterable[Weight]) -> int:
    return sum(weight.parameters for weight in weights)


_BYTES_OF_TYPE = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "float64": 8}


def bytes_of_type(name: str) -> int:
    """Bytes of a number of config.json's `dtype` / `torch_dtype`.

    Raises:
        ConfigurationError: mtppp does not know the type.
    """
    plain = name.removeprefix("torch.")
    if plain not in _BYTES_OF_TYPE:
        raise ConfigurationError(
            f"config.json names the type {name!r}, which mtppp does not know",
            hint=f"known: {', '.join(sorted(_BYTES_OF_TYPE))}",
        )
    return _BYTES_OF_TYPE[plain]
