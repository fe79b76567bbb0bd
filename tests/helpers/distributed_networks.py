"""Whole models over ranks: data parallel, sharded, recalibrated."""

import functools
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

import mixnorm

CHANNELS = 5
UNEQUAL = slice(0, 3), slice(3, 3), slice(3, 7), slice(7, 8)  # parts of a batch of eight
SHARDED = ("fully_shard", "fully_shard, bfloat16", "FSDP", "FSDP, flat parameters", "FSDP, bfloat16")
DATA_PARALLEL = {"plain": {"broadcast_buffers": False}, "broadcast": {"broadcast_buffers": True}, "accumulate": {}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, CHANNELS, 3),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(inplace=True),
            nn.Conv2d(CHANNELS, 4, 2),
            nn.BatchNorm2d(4),
        )
        self.head = nn.Linear(4 * 3 * 2, 6)
        self.spare = nn.Linear(2, 2)  # takes part in no forward pass

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def network():
    torch.manual_seed(0)
    return mixnorm.synchronize(mixnorm.convert(Network(), num_components=2, backend="reference"))


def network_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 2, 6, 5, generator=generator), torch.randn(8, 6, generator=generator)


def train(model, part, *, scale, accumulate=False):
    """Four batches of SGD on a part of each; ``scale`` makes the mean over ranks, which they take of gradients, a sum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for step in range(4):
        x, upstream = (t[part] for t in network_batch(step))
        last = not accumulate or step % 2 == 1
        with nullcontext() if last or scale == 1 else model.no_sync():
            (model(x) * upstream * scale).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def data_parallel(rank, pair):
    """The state of a small network after training under DistributedDataParallel in its modes, and its evaluation."""
    found = {}
    for name, options in DATA_PARALLEL.items():
        part = UNEQUAL[rank] if name == "plain" else slice(2 * rank, 2 * rank + 2)
        model = DistributedDataParallel(network(), find_unused_parameters=True, **options)
        train(model, part, scale=4, accumulate=name == "accumulate")
        found[name] = state_and_evaluation(model, model.module.state_dict())
    return found


def sharded(rank, pair):
    """The same under both kinds of FSDP, which shard a norm on its own and one with the rest."""
    found = {}
    for name in SHARDED:
        model = shard(network(), name)
        train(model, UNEQUAL[rank], scale=4)
        state = {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in model.state_dict().items()}
        found[name] = state_and_evaluation(model, state)
    return found


def shard(model, name):
    lower = torch.bfloat16 if "bfloat16" in name else None
    alone = model.body[0], model.body[1], model.body[3]
    if "fully_shard" in name:
        for module in (*alone, model):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32))
        return model
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in alone)
    precision = MixedPrecision(param_dtype=lower, buffer_dtype=lower, reduce_dtype=torch.float32) if lower else None
    whole = name == "FSDP, flat parameters"  # which cannot be told apart from outside: there is one for each unit
    options = {"use_orig_params": not whole, "mixed_precision": precision, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def state_and_evaluation(model, state):
    state = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        return {"state": state, "evaluated": model.eval()(network_batch(99)[0]).float().clone()}


def broadcast_buffers(rank, pair):
    """Histories of each rank's own batches, of which DistributedDataParallel makes the first rank's."""
    found = {}
    for inference in ("ensemble", "pooled"):
        layer = history_layer(inference)
        model = DistributedDataParallel(layer)
        for step in range(2):
            model(history_batch(rank, step)).sum().backward()
        own = layer.history_means.clone()
        evaluated = model.eval()(history_batch(0, 9)).detach()
        found[inference] = {"own": own, "state": dict(layer.state_dict()), "evaluated": evaluated}
    return found


def history_layer(inference):
    torch.manual_seed(0)
    return mixnorm.MixtureNorm2d(CHANNELS, history=5, inference=inference, backend="reference")


def history_batch(rank, step):
    return torch.randn(4, CHANNELS, 3, 3, generator=torch.Generator().manual_seed(100 * rank + step)) + rank


BATCHES = (1, 3, 2, 2)  # of the ranks that recalibrate


class WithView(nn.Module):
    """A model that takes no empty batch, with a batch norm of each rank's own behind a synchronized norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = mixnorm.MixtureNorm2d(2, num_components=2, backend="reference")
        self.batch_norm = nn.BatchNorm2d(2)
        self.linear = nn.Linear(18, 3)

    def forward(self, x, scale):
        x = self.batch_norm(self.norm(x).relu_()) * scale
        return self.linear(x.view(x.shape[0], -1))


def recalibrated(rank, pair):
    """Fewer batches on some ranks than on others, and none on one."""
    model = mixnorm.synchronize(WithView())
    torch.manual_seed(1)
    mixnorm.recalibrate(
        model, [{"x": recalibration_batch(rank, i), "scale": torch.ones(2, 1, 1)} for i in range(BATCHES[rank])]
    )
    found = {"state": {name: value.clone() for name, value in model.state_dict().items()}}
    found["hooks"] = len(model.norm._forward_hooks) + len(model.norm._forward_pre_hooks)
    found["error"] = error_of(lambda: mixnorm.recalibrate(model.norm, [recalibration_batch(rank, 0)] if rank != 2 else []))
    found["kept"] = torch.equal(model.norm.history_means, found["state"]["norm.history_means"])
    return found


def recalibration_batch(rank, step):
    return torch.randn(2 + rank, 2, 3, 3, generator=torch.Generator().manual_seed(10 * rank + step)) * 2 + rank


def error_of(call):
    """What the call says as it fails; empty if it does not."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""
