"""Train one of the demo models: a tiny mixture of experts with a multi-token-prediction layer.

    python scripts/train_demo_model.py glm4_moe|deepseek_v3 OUT_DIR [--steps N] [--minutes N] [--seed N]

Needs torch, transformers, tokenizers and safetensors; runs on two CPU cores. The text comes from
`demo_text.py`. What is written loads in vLLM and in transformers like any checkpoint of the family.

The MTP layer is trained the way vLLM drafts with it. At position p it reads the target's final
hidden state (after the final norm) of p and the token at p + 1, and predicts the token at p + 2.
Each further draft reads, instead of the target's hidden state, the one the MTP layer itself left
at the position before.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_text
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeRMSNorm,
    Glm4MoeTopkRouter,
)

VOCABULARY = 512
HIDDEN = 128
LAYERS = 6
DRAFTS = 3

SEQUENCE = 160  # tokens per row of a batch
ROWS = 12
CHAT_SHARE = 0.5
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
MTP_WEIGHT = 0.3
BALANCE_RATE = 1e-3


@dataclass(frozen=True)
class Family:
    """The classes transformers has for a model type, and the sizes the demo gives it."""

    config: PreTrainedConfig
    model: type[PreTrainedModel]
    layer: type[nn.Module]
    norm: type[nn.Module]
    router: type[nn.Module]


def common_sizes() -> dict[str, Any]:
    """Sizes of both families: heads, experts and intermediate sizes divide by TP 4."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "bos_token_id": demo_text.SPECIAL_TOKENS.index(demo_text.BOS),
        "eos_token_id": demo_text.SPECIAL_TOKENS.index(demo_text.EOS),
        "pad_token_id": demo_text.SPECIAL_TOKENS.index(demo_text.PAD),
        "attn_implementation": "sdpa",
        "dtype": "float32",
    }


def glm4_moe() -> Family:
    """GLM-4.5's layout: grouped-query attention with biases, sigmoid routing."""
    config = Glm4MoeConfig(
        **common_sizes(),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return Family(
        config, Glm4MoeForCausalLM, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeTopkRouter
    )


def deepseek_v3() -> Family:
    """DeepSeek-V3's layout: multi-head latent attention, sigmoid routing by groups.

    vLLM's CPU kernel for latent attention exists only for DeepSeek's own latent size, 512 + 64.
    """
    config = DeepseekV3Config(
        **common_sizes(),
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.5,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return Family(
        config,
        DeepseekV3ForCausalLM,
        DeepseekV3DecoderLayer,
        DeepseekV3RMSNorm,
        DeepseekV3TopkRouter,
    )


FAMILIES: dict[str, Callable[[], Family]] = {"glm4_moe": glm4_moe, "deepseek_v3": deepseek_v3}


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE over the demo text, one token per digit, that begins texts with BOS."""
    rng = random.Random(seed)
    tasks = demo_text.CHAT_TASKS + demo_text.COMPLETION_TASKS
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
            special_tokens=list(demo_text.SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{demo_text.BOS} $A",
        pair=f"{demo_text.BOS} $A $B",
        special_tokens=[(demo_text.BOS, tokenizer.token_to_id(demo_text.BOS))],
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
        tokens = [self._tokenizer.token_to_id(demo_text.BOS)]
        predicted = [False]
        for text, answer in self._pieces():
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            tokens += ids
            predicted += [answer] * len(ids)
            if len(tokens) >= length:
                break
        padding = [self._tokenizer.token_to_id(demo_text.PAD)] * (length - len(tokens))
        return (tokens + padding)[:length], (predicted + [False] * len(padding))[:length]

    def _pieces(self) -> Iterator[tuple[str, bool]]:
        """Pieces of text, each with whether the model is to learn to write it."""
        if self._rng.random() >= CHAT_SHARE:
            exchange = self._rng.choice(demo_text.COMPLETION_TASKS)(self._rng)
            yield exchange.given, False
            yield exchange.answer, True
            return
        while True:
            exchange = self._rng.choice(demo_text.CHAT_TASKS)(self._rng)
            yield f"{demo_text.USER}{exchange.given}{demo_text.ASSISTANT}", False
            yield f"{exchange.answer}{demo_text.EOS}", True


class MtpLayer(nn.Module):
    """The multi-token-prediction layer: drafts from a hidden state and the token after it."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        config = family.config
        self.enorm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # Any index past the dense layers makes this a layer with experts, as vLLM has it.
        self.block = family.layer(config, config.num_hidden_layers - 1)
        self.block.self_attn.layer_idx = 0  # its place in the cache of `draft_losses`
        self.norm = family.norm(config.hidden_size, eps=config.rms_norm_eps)
        # Releases of vLLM differ in whether the next draft reads this layer's output before or
        # after this norm. With unit weights `hnorm` sees the same either way.
        self.norm.weight.requires_grad_(requires_grad=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: DynamicCache,
    ) -> Tensor:
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        output: Tensor = self.block(
            joined,
            attention_mask=mask,
            position_embeddings=position_embeddings,
            past_key_values=cache,
        )
        return output


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
    embedded = model.model.embed_tokens(batch.tokens[:, 1:-1]).clone()
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
        hidden = torch.cat((torch.zeros_like(output[:, :1]), output[:, :-1]), dim=1)
    return losses


class ExpertBalance:
    """Keeps experts evenly used through the routers' correction bias, without a loss term."""

    def __init__(self, router_class: type[nn.Module], *modules: nn.Module) -> None:
        self._routers = [
            part for module in modules for part in module.modules() if isinstance(part, router_class)
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


@dataclass(frozen=True)
class Trained:
    """A trained model with what is worth saying about its training."""

    model: PreTrainedModel
    mtp: MtpLayer
    steps: int
    losses: list[float]  # of the next token and of each draft, in nats


def train(family: Family, rows: Rows, steps: int, minutes: float) -> Trained:
    """Train for `steps` steps, or for fewer when `minutes` run out first."""
    model = family.model(family.config)
    mtp = MtpLayer(family)
    balance = ExpertBalance(family.router, model, mtp)
    parameters = [
        parameter
        for parameter in (*model.parameters(), *mtp.parameters())
        if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    step = 0
    losses: list[Tensor] = []
    while (done := max(step / steps, (time.monotonic() - started) / (60 * minutes))) < 1:
        rate = PEAK_LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 - done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = rows.batch()
        hidden = model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        losses = [
            masked_loss(model.lm_head(hidden), batch.tokens[:, 1:], batch.predicted[:, 1:]),
            *draft_losses(model, mtp, batch, hidden),
        ]
        (losses[0] + MTP_WEIGHT * torch.stack(losses[1:]).mean()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balance.step()
        step += 1
        if step % 50 == 0:
            print_losses(step, time.monotonic() - started, losses)
    return Trained(model, mtp, step, [loss.item() for loss in losses])


def print_losses(step: int, seconds: float, losses: list[Tensor]) -> None:
    values = " ".join(f"{loss.item():.3f}" for loss in losses)
    print(f"step {step} at {seconds:.0f} s: next token and drafts {values}", flush=True)


def checkpoint(trained: Trained) -> dict[str, Tensor]:
    """The tensors under the names the family's checkpoints use, in bfloat16.

    As in those, the MTP layer comes after the others with its own copy of the embedding and of
    the output head, and the routers' correction bias stays in float32.
    """
    config = trained.model.config
    mtp_prefix = f"model.layers.{config.num_hidden_layers}."
    tensors = dict(trained.model.state_dict())
    tensors |= {mtp_prefix + name: value for name, value in trained.mtp.block.state_dict().items()}
    for name in ("enorm", "hnorm", "eh_proj"):
        tensors[f"{mtp_prefix}{name}.weight"] = getattr(trained.mtp, name).weight
    tensors[f"{mtp_prefix}shared_head.norm.weight"] = trained.mtp.norm.weight
    tensors[f"{mtp_prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors[f"{mtp_prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    return {
        name: value.detach()
        .to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        .clone()
        .contiguous()
        for fused, value in tensors.items()
        for name, value in split_experts(fused, value)
    }


def split_experts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks the experts of a layer; checkpoints name each one's matrices."""
    stem, _, matrix = name.rpartition(".")
    if matrix == "gate_up_proj":
        for expert, gate_up in enumerate(value):
            gate, up = gate_up.chunk(2)
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up
    elif matrix == "down_proj":
        for expert, down in enumerate(value):
            yield f"{stem}.{expert}.down_proj.weight", down
    else:
        yield name, value


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_model(directory: Path, trained: Trained, tokenizer: Tokenizer) -> None:
    config = trained.model.config
    config.architectures = [type(trained.model).__name__]
    special = {f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config.to_dict() | {"dtype": "bfloat16"})
    write_json(directory / "generation_config.json", special | {"do_sample": False})
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": demo_text.BOS,
            "eos_token": demo_text.EOS,
            "pad_token": demo_text.PAD,
            "additional_special_tokens": list(demo_text.SPECIAL_TOKENS[3:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": demo_text.CHAT_TEMPLATE,
        },
    )
    save_file(checkpoint(trained), directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one of the demo models.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=9.5, help="at most; slow machines stop early")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    family = FAMILIES[arguments.family]()
    tokenizer = train_tokenizer(arguments.seed)
    trained = train(family, Rows(tokenizer, arguments.seed), arguments.steps, arguments.minutes)
    write_model(arguments.directory, trained, tokenizer)
    for path in sorted(arguments.directory.iterdir()):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
