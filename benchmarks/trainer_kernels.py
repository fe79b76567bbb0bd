"""What the trainer's own kernels are worth: a step with all of them, and without each, in turns.

    python benchmarks/trainer_kernels.py [--precision bf16] [--batch-size 256] [--steps 200] [--rounds 7]

The step is the CIFAR CNN's with batch norm and RMSprop, its batch made on the device; that of DCGAN is timed with one stream
and with two. The images are noise: their values do not matter to the time. On a GPU a step is a CUDA graph, as in the
trainer; on a CPU there are no kernels, and all steps are the same but for noise. A kernel stays if a step without it takes
at least 5% longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from unittest import mock

import gan
import torch

from mixnorm_lab.config.parts.optimizer import Optimizer
from mixnorm_lab.data import Resident
from mixnorm_lab.data.dataset import DataSet, Images
from mixnorm_lab.generators.streams import Beside
from mixnorm_lab.models import CifarCNN, relu_max_pool
from mixnorm_lab.training import optimizers
from mixnorm_lab.training.classifier import ClassifierStep

KERNELS = ("pooling", "rmsprop", "batch")  # models/relu_max_pool_kernel, training/fused_rmsprop, data/resident_kernel
WITHOUT = ((), *((kernel,) for kernel in KERNELS), KERNELS)
SHARE = 0.05  # of a step, which a kernel must be worth


def classifier_step(without, arguments, device):
    """A step of the CIFAR CNN without some kernels, run until it is captured."""
    count = arguments.steps * arguments.batch_size
    made = torch.Generator().manual_seed(0)
    noise = Images(
        torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=made),
        torch.randint(10, (count,), generator=made),
    )
    on_gpu = device.type == "cuda"
    source = Resident(
        DataSet("noise", noise, noise, 10, augment=True), arguments.batch_size, device=device, channels_last=on_gpu
    )
    source.use_kernel &= "batch" not in without
    torch.manual_seed(0)
    model = CifarCNN().to(device, memory_format=torch.channels_last if on_gpu else torch.preserve_format).train()
    with ExitStack() as switched_off:
        if "pooling" in without:
            switched_off.enter_context(mock.patch.object(relu_max_pool, "HAS_TRITON", False))
        if "rmsprop" in without:
            switched_off.enter_context(mock.patch.object(optimizers, "_rmsprop", return_value=torch.optim.RMSprop))
        optimizer = optimizers.build_optimizer(model.parameters(), Optimizer("rmsprop", lr=1e-3, weight_decay=2e-5), device)
        step = ClassifierStep(model, optimizer, source, device=device, bf16=arguments.precision == "bf16")
        run_round(step, 0)
    assert not on_gpu or step._graph is not None
    return step


def gan_step(streams, arguments, device):
    """An update of DCGAN with batch norm on one or two streams, run until it is captured."""
    sizes = argparse.Namespace(precision=arguments.precision, batch_size=arguments.gan_batch_size, updates=arguments.steps)
    step = gan.make_step("bn", sizes, device)
    if streams == 1:
        step._beside = Beside(torch.device("cpu"))
    run_round(step, 0)
    return step


def run_round(step, number):
    """Milliseconds a step, over an epoch."""
    step.source.start_epoch(0, number)
    step.start_epoch()
    start = time.perf_counter()
    for _ in step.run_epoch():
        pass
    return 1e3 * (time.perf_counter() - start) / step.steps


def compare(steps, rounds):
    """The median milliseconds of steps by their names, timed in turns."""
    times = {name: [] for name in steps}
    for number in range(1, rounds + 1):
        for name, step in steps.items():
            times[name].append(run_round(step, number))
    return {name: statistics.median(values) for name, values in times.items()}


def tell(what, fast, slow, device):
    worth = slow / fast - 1
    verdict = "" if device.type == "cpu" else ": stays" if worth >= SHARE else ": is worth less than 5%"
    print(f"  {what} {slow:.4f} ms, {100 * worth:+.1f}%{verdict}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--gan-batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=7, help="that are timed, after one that is not")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True  # as in the trainer
    found = compare({without: classifier_step(without, arguments, device) for without in WITHOUT}, arguments.rounds)
    print(f"CIFAR CNN, batch {arguments.batch_size}, {arguments.precision}, {device}: {found[()]:.4f} ms a step")
    for without in WITHOUT[1:]:
        tell(f"without {', '.join(without)}", found[()], found[without], device)
    found = compare({streams: gan_step(streams, arguments, device) for streams in (2, 1)}, arguments.rounds)
    print(f"DCGAN, batch {arguments.gan_batch_size}, {arguments.precision}, {device}: {found[2]:.4f} ms an update")
    tell("on one stream", found[2], found[1], device)


if __name__ == "__main__":
    main()
