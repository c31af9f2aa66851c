"""Train one of the demo models: a tiny mixture of experts with a multi-token-prediction layer.

    python scripts/train_demo_model.py FAMILY OUT_DIR [--minutes N] [--seed N]

FAMILY is glm4_moe, deepseek_v3 or glm_moe_dsa.

Needs torch, transformers, tokenizers and safetensors; runs on two CPU cores. What is written loads
in vLLM and in transformers like any checkpoint of the family.
"""

import argparse
from pathlib import Path

import torch

from demo_model.architecture import FAMILIES, MtpLayer
from demo_model.checkpoint import Trained, write_model
from demo_model.data import Rows, train_tokenizer
from demo_model.sparse import Indexers
from demo_model.training import train_mtp, train_target

TARGET_SHARE = 0.75  # of the minutes, when they run out before the steps are done


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one of the demo models.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--minutes", type=float, default=9.5, help="train no longer than this")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    family = FAMILIES[arguments.family]()
    tokenizer = train_tokenizer(arguments.seed)
    rows = Rows(tokenizer, arguments.seed)
    model, mtp = family.model(family.config), MtpLayer(family)
    target_minutes = TARGET_SHARE * arguments.minutes
    top = getattr(family.config, "index_topk", None)
    indexers = Indexers(top, model, mtp) if top else None
    target_progress = train_target(family, model, rows, target_minutes, indexers)
    mtp_minutes = arguments.minutes - target_minutes
    mtp_progress = train_mtp(family, model, mtp, rows, mtp_minutes, indexers)
    trained = Trained(model, mtp, target_progress, mtp_progress)
    write_model(arguments.directory, trained, tokenizer, arguments.seed)
    for path in sorted(arguments.directory.iterdir()):
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
