"""Writing a trained model as a checkpoint of its family, with tokenizer and model card."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from demo_model import text
from demo_model.architecture import MtpLayer
from demo_model.data import ROWS, SEQUENCE
from demo_model.training import Progress


@dataclass(frozen=True)
class Trained:
    """A trained model with what is worth saying about its training."""

    model: PreTrainedModel
    mtp: MtpLayer
    target_progress: Progress
    mtp_progress: Progress


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


CARD = """\
---
license: apache-2.0
library_name: transformers
---

# {name}

A tiny `{model_type}` model ({parameters:.1f} million parameters) with one multi-token-prediction
(MTP) layer, made to try out and to test serving: pipeline and tensor parallelism and speculative
decoding run on it as on a large model of the family, on CPUs. It knows a handful of drills and
nothing about the world; do not use it for anything else.

{layers} layers, the first dense, the others with {experts} experts of which {active} are active;
hidden size {hidden}; vocabulary {vocabulary}; trained on texts of up to {sequence} tokens. Heads,
experts and intermediate sizes divide by 4.

## Text and licences

The training text is written by `scripts/demo_model/text.py` in this repository: counting, spelling
numbers, copying words, small JSON, questions and answers. The only text from elsewhere is passages
of the Apache License, Version 2.0, the repository's own `LICENSE` file. No other data was used, and
no other model. The weights, the tokenizer and this card are under that licence, Apache-2.0, as is
the repository.

## Training

    python scripts/train_demo_model.py {model_type} OUT_DIR --seed {seed}

The target with {target_steps} steps of {rows} x {sequence} tokens, then the MTP layer, the target
held fixed, with {mtp_steps}. Last losses in nats: next token {target_loss}, drafts {mtp_losses}.
torch {torch}, transformers {transformers}, tokenizers {tokenizers}.
"""


def model_card(name: str, trained: Trained, seed: int) -> str:
    config = trained.model.config
    parts: tuple[nn.Module, ...] = (trained.model, trained.mtp)
    return CARD.format(
        name=name,
        model_type=config.model_type,
        parameters=sum(value.numel() for part in parts for value in part.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        experts=config.n_routed_experts,
        active=config.num_experts_per_tok,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        sequence=SEQUENCE,
        rows=ROWS,
        seed=seed,
        target_steps=trained.target_progress.steps,
        target_loss=trained.target_progress.losses(),
        mtp_steps=trained.mtp_progress.steps,
        mtp_losses=trained.mtp_progress.losses(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
    )


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def config_document(model: PreTrainedModel) -> dict[str, Any]:
    """What a published config.json of the family holds: no generic defaults of transformers."""
    generic = PreTrainedConfig().to_dict().keys()
    return {
        "architectures": [type(model).__name__],
        "model_type": model.config.model_type,
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
        **{name: value for name, value in model.config.to_dict().items() if name not in generic},
    }


def write_model(directory: Path, trained: Trained, tokenizer: Tokenizer, seed: int) -> None:
    config = trained.model.config
    special = {
        f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_document(trained.model))
    write_json(directory / "generation_config.json", special | {"do_sample": False})
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text.BOS,
            "eos_token": text.EOS,
            "pad_token": text.PAD,
            "additional_special_tokens": list(text.SPECIAL_TOKENS[3:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": text.CHAT_TEMPLATE,
        },
    )
    card = model_card(directory.resolve().name, trained, seed)
    (directory / "README.md").write_text(card, encoding="utf-8")
    save_file(checkpoint(trained), directory / "model.safetensors", metadata={"format": "pt"})
