"""The demo text as tokens: the tokenizer, and rows of tokens to train on."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from demo_model import text

VOCABULARY = 512
SEQUENCE = 160  # tokens per row
ROWS = 12  # rows per batch
CHAT_SHARE = 0.5


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE over the demo text, one token per digit, that begins texts with BOS."""
    rng = random.Random(seed)
    tasks = text.CHAT_TASKS + text.COMPLETION_TASKS
    exchanges = [task(rng) for task in tasks for _ in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (exchange.given + exchange.answer for exchange in exchanges),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(text.SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text.BOS} $A",
        pair=f"{text.BOS} $A $B",
        special_tokens=[(text.BOS, tokenizer.token_to_id(text.BOS))],
    )
    return tokenizer


@dataclass(frozen=True)
class Batch:
    """`tokens` [rows, SEQUENCE + 1] and, of the same shape, which of them are to be predicted."""

    tokens: Tensor
    predicted: Tensor


class Rows:
    """Endless rows of demo text: conversations of many turns, and single texts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    def batch(self) -> Batch:
        rows = [self._row() for _ in range(ROWS)]
        return Batch(
            torch.tensor([tokens for tokens, _ in rows]),
            torch.tensor([predicted for _, predicted in rows]),
        )

    def _row(self) -> tuple[list[int], list[bool]]:
        """One row, cut or padded to SEQUENCE + 1 tokens."""
        length = SEQUENCE + 1
        tokens = [self._tokenizer.token_to_id(text.BOS)]
        predicted = [False]
        for piece, is_answer in self._pieces():
            ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
            tokens += ids
            predicted += [is_answer] * len(ids)
            if len(tokens) >= length:
                break
        padding = [self._tokenizer.token_to_id(text.PAD)] * (length - len(tokens))
        return (tokens + padding)[:length], (predicted + [False] * len(padding))[:length]

    def _pieces(self) -> Iterator[tuple[str, bool]]:
        """Pieces of text, each with whether the model is to learn to write it."""
        if self._rng.random() >= CHAT_SHARE:
            exchange = self._rng.choice(text.COMPLETION_TASKS)(self._rng)
            yield exchange.given, False
            yield exchange.answer, True
            return
        while True:
            exchange = self._rng.choice(text.CHAT_TASKS)(self._rng)
            yield f"{text.USER}{exchange.given}{text.ASSISTANT}", False
            yield f"{exchange.answer}{text.EOS}", True
