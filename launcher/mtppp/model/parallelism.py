"""Whether a model can be split over so many ranks, said in the model's words.

vLLM refuses most of this too, minutes later and from inside a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtppp.model.facts import ModelFacts
from mtppp.model.layers import Layer, padded_vocabulary
from mtppp.model.weights import Axis, Quantisation, Split, Storage, Weight

SPARSE_ATTENTION_FROM = (9, 0)
"""Compute capability that the kernels for sparse latent attention begin at (Hopper)."""


@dataclass(frozen=True)
class Problem:
    """Why a split is not possible.

    Attributes:
        code: stable name, for exceptions that an operator takes upon himself.
        message: in the model's words.
    """

    code: str
    message: str


def parallel_problems(
    facts: ModelFacts, *, tensor: int, pipeline: int = 1, expert: int | None = None
) -> tuple[Problem, ...]:
    """Everything in the way of TP `tensor` x PP `pipeline`, and experts over `expert` ranks.

    What the model's configuration does not tell is not checked: see `ModelFacts.unknowns`.

    Args:
        expert: ranks that whole experts are spread over (TP x DP) with expert parallelism;
            None without.
    """
    problems = [
        *_heads(facts, tensor),
        *_vocabulary(facts, tensor),
        *_experts(facts, expert),
        *_matrices(facts, tensor, expert),
    ]
    starts = len(facts.couplings.legal_starts(facts.layer_count))
    if pipeline > starts:
        problems.append(
            Problem(
                "pipeline-too-long",
                f"{pipeline} pipeline stages, but a stage may begin at only {starts} of the "
                f"{facts.layer_count} layers",
            )
        )
    return tuple(problems)


def gpu_problems(facts: ModelFacts, capability: tuple[int, int]) -> tuple[Problem, ...]:
    """What the model needs that a GPU of this compute capability (9, 0 for H100) lacks."""
    if facts.sparse and capability < SPARSE_ATTENTION_FROM:
        major, minor = capability
        return (
            Problem(
                "sparse-attention-gpu",
                f"the model attends sparsely (DSA, index_topk {facts.index_topk}), which vLLM's "
                f"kernels do from compute capability 9.0 (Hopper) on; these GPUs have "
                f"{major}.{minor}",
            ),
        )
    return ()


def draft_problems(facts: ModelFacts, drafts: int) -> tuple[Problem, ...]:
    """What is in the way of `drafts` draft tokens from the model's own MTP layers."""
    layers = facts.mtp_layers
    if not drafts or layers is None:
        return ()
    if layers == 0:
        return (Problem("no-mtp-layer", "the model has no MTP layer to draft with"),)
    if drafts > layers and drafts % layers:
        return (
            Problem(
                "drafts-not-a-multiple",
                f"{drafts} draft tokens are no multiple of the model's {layers} MTP layers",
            ),
        )
    return ()


def _heads(facts: ModelFacts, tensor: int) -> list[Problem]:
    problems = []
    if facts.heads is not None and facts.heads % tensor:
        problems.append(
            Problem("heads", f"{facts.heads} attention heads do not divide by tensor {tensor}")
        )
    counts = facts.key_value_heads
    # A latent cache has no heads to spread.
    if facts.latent is None and counts is not None and not _spread_or_repeated(counts, tensor):
        problems.append(
            Problem(
                "key-value-heads",
                f"{counts} key/value heads can be neither spread over nor repeated on "
                f"{tensor} tensor ranks: one of the numbers must divide the other",
            )
        )
    for layer in _kinds(facts):
        problems += _cache_heads(layer, tensor)
    return list(dict.fromkeys(problems))


def _spread_or_repeated(heads: int, tensor: int) -> bool:
    return heads % tensor == 0 or tensor % heads == 0


def _kinds(facts: ModelFacts) -> list[Layer]:
    """One layer of each kind of attention and MLP."""
    if facts.stack is None:
        return []
    kinds: dict[tuple[str, str, bool], Layer] = {}
    for layers, is_mtp in ((facts.stack.layers, False), (facts.stack.mtp, True)):
        for layer in layers:
            kinds.setdefault((layer.attention, layer.mlp, is_mtp), layer)
    return list(kinds.values())


def _cache_heads(layer: Layer, tensor: int) -> list[Problem]:
    problems = []
    if layer.attention == "linear":
        for weight in layer.weights:
            if weight.split is Split.TENSOR and weight.units % tensor:
                problems.append(
                    Problem(
                        "linear-heads",
                        f"linear attention's {weight.units} heads do not divide by tensor {tensor}",
                    )
                )
                break
    if layer.attention == "sliding":
        for weight in layer.weights:
            if weight.name == "self_attn.q_proj" and weight.units % tensor:
                problems.append(
                    Problem(
                        "heads",
                        f"{weight.units} heads of the sliding layers do not divide by tensor "
                        f"{tensor}",
                    )
                )
            if weight.name == "self_attn.k_proj" and not _spread_or_repeated(weight.units, tensor):
                problems.append(
                    Problem(
                        "key-value-heads",
                        f"{weight.units} key/value heads of the sliding layers can be neither "
                        f"spread over nor repeated on {tensor} tensor ranks",
                    )
                )
    return problems


def _vocabulary(facts: ModelFacts, tensor: int) -> list[Problem]:
    if facts.vocabulary is None:
        return []
    padded = padded_vocabulary(facts.vocabulary)
    if padded % tensor == 0:
        return []
    return [
        Problem(
            "vocabulary",
            f"a vocabulary of {facts.vocabulary} (padded to {padded}) does not divide by tensor "
            f"{tensor}",
        )
    ]


def _experts(facts: ModelFacts, expert: int | None) -> list[Problem]:
    if facts.experts is None or expert is None or facts.experts.count % expert == 0:
        return []
    return [
        Problem("experts", f"{facts.experts.count} experts do not divide by {expert} expert ranks")
    ]


def _matrices(facts: ModelFacts, tensor: int, expert: int | None) -> list[Problem]:
    """Widths that do not divide, and cuts inside a quantisation block, whose one scale two ranks
    would share."""
    if tensor == 1:
        return []
    problems = []
    for layer in _kinds(facts):
        for weight in layer.weights:
            is_whole = weight.split is Split.REPLICATED or (
                weight.split is Split.EXPERT and expert is not None
            )
            if is_whole or weight.storage is not Storage.QUANTISED:
                continue
            quantised = facts.quantisation.covers(f"{layer.prefix}.{weight.name}")
            problems += _matrix(weight, facts.quantisation if quantised else None, tensor)
    return list(dict.fromkeys(problems))


def _matrix(weight: Weight, quantisation: Quantisation | None, tensor: int) -> list[Problem]:
    module = weight.name.rpartition(".")[0]
    if weight.units % tensor:
        # Heads, which may also be repeated, have words of their own.
        if not module.startswith("mlp"):
            return []
        return [
            Problem(
                "width", f"{module}: a width of {weight.units} does not divide by tensor {tensor}"
            )
        ]
    if quantisation is None or quantisation.block is None:
        return []
    along_inputs = weight.cut is Axis.INPUTS
    size = weight.columns if along_inputs else weight.rows
    block = quantisation.block[1 if along_inputs else 0]
    if size // tensor % block == 0:
        return []
    return [
        Problem(
            "quantisation-block",
            f"{module}: {size} {'channels' if module.startswith('mlp') else weight.cut} over "
            f"tensor {tensor} are {size // tensor} each, not a multiple of the checkpoint's "
            f"{quantisation.method} block of {block}",
        )
    ]
