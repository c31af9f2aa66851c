"""Training: first the target, then its multi-token-prediction layer.

The MTP layer is trained the way vLLM drafts with it. At position p it reads the target's final
hidden state (after the final norm) of p and the token at p + 1, and predicts the token at p + 2.
Each further draft reads, instead of the target's hidden state, the one the MTP layer itself left
at the position before.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from demo_model.architecture import Family, MtpLayer
from demo_model.data import Batch, Rows
from demo_model.sparse import Indexers

DRAFTS = 3
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
TARGET_STEPS = 1000
MTP_STEPS = 250
BALANCE_RATE = 1e-3
DENSE_SHARE = 0.6  # of a training, in which sparse attention still attends to everything
REPORT_STEPS = 25


def masked_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the positions in `mask`."""
    return functional.cross_entropy(logits[mask], targets[mask])


def draft_mask(length: int, draft: int) -> Tensor:
    """What the layer sees at draft number `draft`: [1, 1, length, (draft + 1) * length].

    A chain of drafts that starts at position p sees the keys made from the target's hidden
    states up to p, and its own key at each position after.
    """
    query = torch.arange(length)[:, None]
    key = torch.arange(length)[None, :]
    seen = [key <= query - draft] + [key == query - draft + step for step in range(1, draft + 1)]
    return torch.cat(seen, dim=1)[None, None]


def draft_losses(
    model: PreTrainedModel, mtp: MtpLayer, batch: Batch, hidden: Tensor
) -> list[Tensor]:
    """The loss of each of the DRAFTS drafts; `hidden` is [rows, SEQUENCE, HIDDEN]."""
    embedded = model.model.embed_tokens(batch.tokens[:, 1:-1])
    embedded[:, 0] = 0  # vLLM blanks the embedding at position 0
    hidden = hidden[:, :-1]
    length = hidden.shape[1]
    positions = model.model.rotary_emb(hidden, torch.arange(length)[None])
    cache = DynamicCache()
    losses = []
    for draft in range(DRAFTS):
        output = mtp(hidden, embedded, positions, draft_mask(length, draft), cache)
        logits = model.lm_head(mtp.norm(output))
        losses.append(
            masked_loss(
                logits[:, draft:], batch.tokens[:, draft + 2 :], batch.predicted[:, draft + 2 :]
            )
        )
        # The next draft, one position on, reads what this one left.
        hidden = functional.pad(output[:, :-1], (0, 0, 1, 0))
    return losses


class ExpertBalance:
    """Keeps experts evenly used through the routers' correction bias, without a loss term."""

    def __init__(self, router_class: type[nn.Module], *modules: nn.Module) -> None:
        self._routers = [
            part
            for module in modules
            for part in module.modules()
            if isinstance(part, router_class)
        ]
        self._loads = [torch.zeros(router.num_experts) for router in self._routers]
        for router, load in zip(self._routers, self._loads, strict=True):
            router.register_forward_hook(self._counter(load))

    @staticmethod
    def _counter(load: Tensor) -> Callable[[nn.Module, Any, tuple[Tensor, Tensor, Tensor]], None]:
        def count(_router: nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
            load.add_(torch.bincount(outputs[2].flatten(), minlength=len(load)))

        return count

    def step(self) -> None:
        for router, load in zip(self._routers, self._loads, strict=True):
            router.e_score_correction_bias += BALANCE_RATE * torch.sign(load.mean() - load)
            load.zero_()


class Progress:
    """Counts steps and prints the mean losses of the latest REPORT_STEPS every so often."""

    def __init__(self, what: str) -> None:
        self.steps = 0
        self._what = what
        self._started = time.monotonic()
        self._latest: deque[Tensor] = deque(maxlen=REPORT_STEPS)

    def step(self, losses: list[Tensor]) -> None:
        self.steps += 1
        self._latest.append(torch.stack(losses).detach())
        if self.steps % REPORT_STEPS == 0:
            seconds = time.monotonic() - self._started
            print(
                f"{self._what}: step {self.steps} at {seconds:.0f} s, loss {self.losses()}",
                flush=True,
            )

    def losses(self) -> str:
        """The mean losses of the latest steps in nats, one per token predicted."""
        if not self._latest:
            return "none"
        means = torch.stack(list(self._latest)).mean(dim=0).tolist()
        return ", ".join(f"{mean:.2f}" for mean in means)


@dataclass(frozen=True)
class Moment:
    """Of a training: the share of it that is done, and the learning rate."""

    done: float
    learning_rate: float


def moments(steps: int, minutes: float) -> Iterator[Moment]:
    """One per step; fewer when `minutes` run out first."""
    started = time.monotonic()
    for step in range(steps):
        done = max(step / steps, (time.monotonic() - started) / (60 * minutes))
        if done >= 1:
            return
        yield Moment(done, PEAK_LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 - done))


class Optimizer:
    """AdamW with clipped gradients and a learning rate given at each step."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [value for value in module.parameters() if value.requires_grad]
        self._adam = torch.optim.AdamW(self._parameters, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, loss: Tensor, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adam.step()
        self._adam.zero_grad()


def train_target(
    family: Family,
    model: PreTrainedModel,
    rows: Rows,
    minutes: float,
    indexers: Indexers | None,
) -> Progress:
    optimizer = Optimizer(model)
    balance = ExpertBalance(family.router, model)
    progress = Progress("target")
    for moment in moments(TARGET_STEPS, minutes):
        batch = rows.batch()
        if indexers:
            indexers.dense = moment.done < DENSE_SHARE
        logits = model(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        loss = masked_loss(logits, batch.tokens[:, 1:], batch.predicted[:, 1:])
        optimizer.step(loss + indexers.loss() if indexers else loss, moment.learning_rate)
        balance.step()
        progress.step([loss])
    return progress


def train_mtp(
    family: Family,
    model: PreTrainedModel,
    mtp: MtpLayer,
    rows: Rows,
    minutes: float,
    indexers: Indexers | None,
) -> Progress:
    """Train the MTP layer for the target as it is.

    Few steps on purpose: a drafter that always guesses right exercises rejection as little as one
    that never does exercises acceptance.
    """
    model.requires_grad_(requires_grad=False)
    optimizer = Optimizer(mtp)
    balance = ExpertBalance(family.router, mtp)
    progress = Progress("MTP layer")
    for moment in moments(MTP_STEPS, minutes):
        batch = rows.batch()
        hidden = model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        losses = draft_losses(model, mtp, batch, hidden)
        loss = torch.stack(losses).mean()
        optimizer.step(loss + indexers.loss() if indexers else loss, moment.learning_rate)
        balance.step()
        progress.step(losses)
    return progress
