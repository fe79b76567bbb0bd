"""Ranks: processes that work together and are killed if one of them fails."""

import multiprocessing
import time

import torch.multiprocessing as mp

LIMIT = 60  # seconds that a rank waits for another, and a multiple of what all take
SERVED = ["distributed_helpers", "torch._dynamo", "mixnorm.ops.triton", "numba"]


def start_ranks(work, arguments, world):
    """Runs ``work(rank, *arguments)`` in as many processes, which are killed if one fails or waits for too long."""
    # A server imports what takes seconds once, and each rank is a fork of it.
    multiprocessing.get_context("forkserver").set_forkserver_preload(SERVED)
    context = mp.start_processes(work, arguments, nprocs=world, join=False, start_method="forkserver")
    deadline = time.monotonic() + 2 * LIMIT
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks are not done after {2 * LIMIT} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
