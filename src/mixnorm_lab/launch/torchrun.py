"""The processes that torchrun started, as the team that trains one run together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mixnorm_lab.training.team import ALONE, Team


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def own_device(device: torch.device) -> torch.device:
    """The GPU that is this process's own among those of the machine; on a CPU the processes share it."""
    if device.type != "cuda":
        return device
    number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= count:
        raise ValueError(f"there are more processes than GPUs here: start torchrun with --nproc-per-node {count}")
    return torch.device("cuda", number)


@contextmanager
def joined(device: torch.device) -> Iterator[Team]:
    """The team of those that torchrun started; ``ALONE`` in any other process."""
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    from torch.distributed.rendezvous import rendezvous  # which a PyTorch without torch.distributed lacks

    store, rank, size = next(rendezvous("env://"))
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        # There torchrun may keep its store through restarts, and with it the addresses of processes that are no more. With
        # several machines each restart has a store of its own, and their counts of restarts differ.
        store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    yield Team(rank, size, device)
    dist.destroy_process_group()  # not after an error: the others may never come to it
