"""Where a command's runs are trained: on this machine, on a Ray cluster, or in the processes that torchrun started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mixnorm_lab.cli.common import choice, choose_device, typer
from mixnorm_lab.comparison.run import Machine
from mixnorm_lab.launch import ray_cluster
from mixnorm_lab.launch.torchrun import joined, launched, own_device


@contextmanager
def for_many(name: str, address: str | None, device: str, jobs: int) -> Iterator[Machine]:
    """The engine of a command with many runs."""
    choice("--engine", name, ("local", "ray"))
    if launched():
        raise ValueError("torchrun starts one run: use it with mixnorm train, and for many runs --jobs or --engine ray")
    if name == "local":
        if address is not None:
            raise ValueError("--address is that of a Ray cluster: add --engine ray")
        where = choose_device(device)
        yield Machine(where, where, jobs)
        return
    if jobs > 1:
        raise ValueError("--jobs is not for Ray, which begins a run wherever a GPU or a core is free: leave it out")
    with ray_cluster.connected(address) as cluster:
        yield Machine(cluster.device(device), choose_device("auto"), cluster=cluster)


@contextmanager
def for_one(device: str) -> Iterator[Machine]:
    """The engine of a command with one run, which the processes of torchrun train together."""
    where = choose_device(device)
    if launched():
        where = own_device(where)
    with joined(where) as team:
        try:
            yield Machine(where, where, team=team)
        except ValueError:
            if team.is_first:
                raise
            raise typer.Exit(2) from None  # a mistake in the command, which the first one tells
