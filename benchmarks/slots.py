"""How much of the accuracy is averaging at inference: trained models with fewer of the T mixtures, and with one distilled.

    python benchmarks/slots.py RUN... [--folder OFFICIAL_FILES] [--slots 1 2 5 10 40] [--out slots.csv]

RUN is the folder of a run with its checkpoint, trained with `history` as large as the largest number of slots that is asked
for. Each is evaluated on its own test images, held-out ones if it was trained with --validation, as it was in training.
"""

from __future__ import annotations

import argparse
import copy
import csv
from pathlib import Path

import torch

import mixnorm
from mixnorm.mixture_norm import _MixtureNorm
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import evaluate

BATCH = 1000


def newest(model, slots):
    """A copy whose histories hold the newest mixtures alone. A slot without weights counts for nothing."""
    model = copy.deepcopy(model)
    for norm in model.modules():
        if isinstance(norm, _MixtureNorm) and norm.keeps_history:
            norm.history_weights[..., : norm.history - slots, :] = 0
    return model


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, help="of the data's official files")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 5, 10, 40])
    parser.add_argument("--out", type=Path, help="a CSV file, to which rows are added")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for run in arguments.runs:
        state = checkpoint.read(run)
        if state is None:
            parser.error(f"there is no checkpoint in {run}")
        config = RunConfig.from_json(state["config"])
        model, source = build.prepare(config, device, arguments.folder)
        model.load_state_dict(state["model"])
        model.to(device).eval()
        kept = {norm.history for norm in model.modules() if isinstance(norm, _MixtureNorm)}
        variants = {str(slots): newest(model, slots) for slots in arguments.slots if slots <= min(kept, default=0)}
        variants["distilled"] = mixnorm.distill(copy.deepcopy(model))
        for name, variant in variants.items():
            bf16 = config.precision == "bf16"
            found = evaluate(variant, source.test_batches(BATCH), device=device, bf16=bf16)
            row = [config.name, config.seed, name, round(100 * (1 - found.error), 2), round(found.loss, 4)]
            print(*row, flush=True)
            if arguments.out:
                is_new = not arguments.out.exists()
                with arguments.out.open("a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    if is_new:
                        writer.writerow(["run", "seed", "slots", "accuracy", "loss"])
                    writer.writerow(row)


if __name__ == "__main__":
    main()
