"""Teaching the indexers of sparse attention, whose choices pass no gradient.

An indexer scores positions, and the best of them are what its layer attends to, as do the layers
after it that share the choice. It learns from them: its scores are to be high where those layers,
on average, put their weight. At first they attend to everything, so that it learns from all
positions; then they go by its choice, and it learns from what it chose.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave


@dataclass
class _Lesson:
    """Scores of one indexer in one step, and the weights of each layer that went by them.

    Attributes:
        scores: [rows, positions, positions].
        weights: each [rows, positions, positions].
    """

    scores: Tensor
    weights: list[Tensor] = field(default_factory=list)

    def loss(self) -> Tensor:
        weights = torch.stack(self.weights).mean(dim=0)
        scores = self.scores.masked_fill(weights == 0, torch.finfo(torch.float32).min)
        return -(weights * scores.log_softmax(dim=-1)).sum(dim=-1).mean()


class Indexers:
    """All indexers of some modules, in place of whose `forward` this chooses.

    Args:
        top: how many positions are chosen once `dense` is off.

    Attributes:
        dense: whether every position is chosen.
    """

    def __init__(self, top: int, *modules: nn.Module) -> None:
        self.dense = False
        self._top = top
        self._lessons: list[_Lesson] = []
        self._latest: dict[nn.Module, Tensor] = {}
        for attention in _attentions(*modules):
            attention.register_forward_hook(self._watch)
            if attention.indexer is not None:
                attention.indexer.forward = partial(self._choose, attention.indexer)

    def loss(self) -> Tensor:
        """The mean over what was scored since the last call by indexers that learn."""
        lessons = [lesson for lesson in self._lessons if lesson.scores.requires_grad]
        self._lessons = []
        return torch.stack([lesson.loss() for lesson in lessons]).mean()

    def _choose(
        self,
        indexer: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        length = hidden_states.shape[1]
        if attention_mask.shape[-1] > length:
            # A further draft, one position on, goes by what the first one chose.
            chosen = self._latest[indexer].roll(1, dims=1)
        else:
            scores = index_scores(
                indexer, hidden_states.detach(), q_resid.detach(), position_embeddings
            )
            scores = scores + attention_mask
            self._lessons.append(_Lesson(scores))
            top = length if self.dense else min(self._top, length)
            chosen = scores.detach().topk(top, dim=-1).indices
        self._latest[indexer] = chosen
        return chosen

    def _watch(self, _attention: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        weights = outputs[1].detach().mean(dim=1)
        lesson = self._lessons[-1]
        if weights.shape == lesson.scores.shape:
            lesson.weights.append(weights)


def index_scores(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    """What transformers' indexer computes under `no_grad`, before any mask."""
    rotary = indexer.qk_rope_head_dim
    queries = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    rotated = apply_rotary_pos_emb_interleave(
        queries[..., :rotary], keys[..., :rotary], *position_embeddings, unsqueeze_dim=2
    )
    queries = torch.cat((rotated[0], queries[..., rotary:]), dim=-1)
    keys = torch.cat((rotated[1], keys[..., rotary:]), dim=-1).squeeze(2)
    by_head = torch.einsum("bqhd,bkd->bhqk", queries, keys) * indexer.softmax_scale
    weights = indexer.weights_proj(hidden_states) * indexer.n_heads**-0.5
    return torch.einsum("bhqk,bqh->bqk", by_head.relu(), weights)


def _attentions(*modules: nn.Module) -> Iterator[Any]:
    for module in modules:
        yield from (part for part in module.modules() if hasattr(part, "indexer"))
