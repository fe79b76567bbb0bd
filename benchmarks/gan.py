"""What an update of DCGAN costs, generator and discriminator, with batch norm and with mixture norm, in turns.

    python benchmarks/gan.py [--precision bf16] [--batch-size 64] [--updates 500] [--rounds 5]

The images are noise: their values do not matter to the time. On a GPU each update is one CUDA graph, as in the trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import torch

from mixnorm_lab.config import catalog
from mixnorm_lab.data import Resident
from mixnorm_lab.data.dataset import DataSet, Images
from mixnorm_lab.generators.build import IMAGE, make_networks
from mixnorm_lab.generators.gan import GanStep
from mixnorm_lab.training.optimizers import build_optimizer

NORMS = ("bn", "mn")


def make_step(norm, arguments, device):
    config = dataclasses.replace(catalog.get(f"dcgan/cifar10/{norm}").config, batch_size=arguments.batch_size)
    made = torch.Generator().manual_seed(0)
    count = arguments.updates * config.batch_size
    noise = Images(
        torch.randint(256, (count, *IMAGE), dtype=torch.uint8, generator=made), torch.zeros(count, dtype=torch.long)
    )
    dataset = DataSet("noise", noise, noise, 1, augment=False)
    channels_last = device.type == "cuda"
    source = Resident(dataset, config.batch_size, device=device, channels_last=channels_last, augment=False, signed=True)
    layout = torch.channels_last if channels_last else torch.preserve_format
    networks = [network.to(device, memory_format=layout).train() for network in make_networks(config)]
    optimizers = tuple(build_optimizer(network.parameters(), config.optimizer, device) for network in networks)
    bf16 = arguments.precision == "bf16"
    return GanStep(*networks, optimizers, source, arguments.updates, config.gan.latent, device=device, bf16=bf16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--updates", type=int, default=500, help="in a round")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed, after one that is not")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True  # as in the trainer
    steps = {norm: make_step(norm, arguments, device) for norm in NORMS}
    seconds = {norm: [] for norm in NORMS}
    for round_ in range(arguments.rounds + 1):
        for norm, step in steps.items():
            step.source.start_epoch(0, round_)
            step.start_epoch()
            start = time.perf_counter()
            for _ in step.run_epoch():
                pass
            seconds[norm].append((time.perf_counter() - start) / arguments.updates)
    bn, mn = (1e3 * statistics.median(seconds[norm][1:]) for norm in NORMS)
    print(f"DCGAN, batch {arguments.batch_size}, {arguments.precision}, {device}: batch norm {bn:.3f} ms an update, "
          f"mixture norm {mn:.3f} ms ({mn / bn:.3f} times)")  # fmt: skip


if __name__ == "__main__":
    main()
