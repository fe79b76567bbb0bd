"""What goes wrong between ranks, and what each of them is told."""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from distributed_networks import error_of, network

import mixnorm
from mixnorm.ops import distributed


def errors(rank, pair):
    """One point on one rank and none on the others; a gradient of the gradient."""
    layer = mixnorm.MixtureNorm2d(3, process_group="world", backend="reference")
    x = torch.randn(4, 3, 2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return {
        "single point": error_of(lambda: layer(torch.randn(1 if rank == 1 else 0, 3, 1, 1))),
        "twice": error_of(lambda: grad.square().sum().backward()),
    }


def disagreements(rank, pair):
    """What one rank does otherwise than the others, which all of them hear of at once."""
    other, x = rank == 2, torch.randn(4, 2, 6, 5)

    def frozen():
        model = network()
        model(x)
        if other:
            mixnorm.freeze(model.body[1])
        model(x)

    def another_option():
        mixnorm.MixtureNorm2d(2, num_components=2 + other, process_group="world", backend="reference")(x)

    def no_gradient():
        with torch.set_grad_enabled(not other):
            network()(x)

    def another_step():
        if other:
            mixnorm.recalibrate(network(), [x])
        else:
            network()(x)

    calls = {"frozen": frozen, "option": another_option, "gradient": no_gradient, "step": another_step}
    return {name: error_of(call) for name, call in calls.items()}


def silence(rank, pair):
    """One rank does otherwise than the others, which wait for it until their group's timeout."""
    patience, distributed.PATIENCE = distributed.PATIENCE, timedelta(seconds=0.2)
    found = {"evaluation": left_alone(rank, in_evaluation), "backward": left_alone(rank, without_backward)}
    distributed.PATIENCE = patience
    return found


def left_alone(rank, step):
    """What a rank says while it waits, and in the end."""
    group = dist.new_group(timeout=timedelta(seconds=1))  # of its own: it is of no use afterwards
    layer = mixnorm.MixtureNorm2d(2, process_group=group, backend="reference")
    x = torch.randn(4, 2, 3, 3, requires_grad=True)
    dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        error = error_of(lambda: step(layer, x, rank == 3, group))
    dist.barrier()
    return {"warnings": [str(warning.message) for warning in seen], "error": error}


def in_evaluation(layer, x, other, group):
    """One rank sends gradients, as DistributedDataParallel does, where the others are still in the layer."""
    layer.train(not other)(x)
    if other:
        dist.all_reduce(torch.ones(1000), group=group)


def without_backward(layer, x, other, group):
    y = layer(x)
    if not other:
        y.sum().backward()
