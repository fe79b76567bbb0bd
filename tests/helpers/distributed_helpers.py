"""What each rank does for ``test_distributed.py``: all of it in one launch of four, because a launch costs seconds."""

import copy
import functools
import multiprocessing
import pickle
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mixnorm
from mixnorm.ops import distributed

CHANNELS = 5
LIMIT = 60  # seconds that a rank waits for another, and a multiple of what all take
SERVED = ["distributed_helpers", "torch._dynamo", "mixnorm.ops.triton", "numba"]


@dataclass(frozen=True)
class Case:
    """Some training steps of a layer, of which rank r has ``sizes[r]`` images."""

    sizes: tuple
    options: dict = field(default_factory=dict)
    layer: type = mixnorm.MixtureNorm2d
    shape: tuple = (CHANNELS, 4, 3)
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    seeds_differ: bool = False
    checkpointed: bool = False
    compiled: bool = False
    in_place: bool = False  # an operation in place behind the layer
    steps: int = 2


CASES = {
    "two": Case((6, 6)),
    "four": Case((4, 4, 4, 4)),
    "unequal": Case((3, 1, 5, 2), channels_last=True),
    "empty": Case((0, 5, 0, 4)),
    "one has all": Case((0, 7)),
    "few": Case((1, 0, 1, 1), shape=(CHANNELS, 1, 1)),
    "all empty": Case((0, 0, 0, 0)),
    "other seeds": Case((4, 5, 3, 2), seeds_differ=True),
    "channel": Case((3, 0, 4, 2), {"population": "channel"}),
    "channel, relu": Case((6, 5), {"population": "channel", "activation": "relu"}),
    "relu, paper's affine": Case((3, 5), {"activation": "relu", "affine_mode": "statistics"}),
    "gelu": Case((3, 1, 2, 2), {"activation": "gelu"}),
    "one component": Case((3, 0, 2, 2), {"num_components": 1}),
    "small bound": Case((6, 3), {"max_samples": 40, "num_components": 4, "em_iters": 5}),
    "all points": Case((6, 3), {"sample_fraction": 1.0}),
    "warm": Case((3, 2, 0, 4), {"seeding": "warm"}),
    "warm for long": Case((3, 2), {"seeding": "warm"}, dtype=torch.float64, steps=6),
    "pooled": Case((3, 2, 0, 4), {"inference": "pooled"}),
    "no affine": Case((3, 2), {"affine": False}),
    "no history": Case((3, 2), {"track_running_stats": False}),
    "compiled loops": Case((3, 0, 4, 2), {"backend": "auto"}),
    "triton": Case(
        (2, 3), {"backend": "triton", "num_components": 2, "activation": "relu"}, shape=(CHANNELS, 2, 3), steps=1
    ),
    "double": Case((3, 1, 5, 2), dtype=torch.float64),
    "bfloat16": Case((3, 1, 5, 2), dtype=torch.bfloat16),
    "1d": Case((20, 9, 0, 30), layer=mixnorm.MixtureNorm1d, shape=(CHANNELS,)),
    "3d": Case((2, 3), layer=mixnorm.MixtureNorm3d, shape=(CHANNELS, 3, 2, 2)),
    "checkpointed": Case((3, 2), checkpointed=True),
    "checkpointed, warm": Case((6, 5), {"seeding": "warm"}, checkpointed=True),
    "compiled": Case((3, 2), compiled=True),
    "in place": Case((1, 3), in_place=True),
    "in place, channel": Case((1, 0, 3, 1), {"population": "channel", "activation": "relu"}, in_place=True),
}


ON_GPU = [
    name
    for name in CASES
    if len(CASES[name].sizes) == 2 and CASES[name].options.get("backend") != "triton" and not CASES[name].compiled
]


def batch(case, step, device):
    """The whole batch with two overlapping modes, and the gradient of its output."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(case.sizes), *case.shape)
    mode = torch.randint(0, 2, (shape[0], 1, *shape[2:]), generator=generator)
    x = (torch.randn(shape, generator=generator) * 1.5 + 3 * mode + 10).to(case.dtype)
    return x.to(device), torch.randn(shape, generator=generator).to(device, case.dtype)


def run(case, rank=None, group=None, device="cpu"):
    """The steps of one rank, or of one process with the whole batch; evaluation at the end."""
    # The loops for the CPU take seconds to compile, in each process.
    options = {"backend": "reference" if device == "cpu" else "auto", **case.options}
    layer = case.layer(CHANNELS, dtype=torch.promote_types(case.dtype, torch.float32), process_group=group, **options)
    if layer.affine:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            layer.weight.uniform_(0.5, 1.5, generator=generator)
            layer.bias.uniform_(-1, 1, generator=generator)
    layer.to(device)
    torch.manual_seed(rank if case.seeds_differ and rank else 0)
    found = {"y": [], "grad": [], "rank": rank}
    for step in range(case.steps):
        x, upstream = batch(case, step, device)
        if rank is not None:
            x, upstream = x.split(case.sizes)[rank], upstream.split(case.sizes)[rank]
        if case.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        call = torch.compile(layer, backend="eager") if case.compiled and rank is not None else layer
        y = checkpoint(call, x, use_reentrant=False) if case.checkpointed else call(x)
        y = y.clamp_(-1, 1) if case.in_place else y
        y.backward(upstream)
        assert y.dtype == x.dtype
        assert y.is_contiguous(memory_format=torch.channels_last if case.channels_last else torch.contiguous_format)
        found["y"].append(y.detach())
        found["grad"].append(x.grad)
    found["parameters"] = [p.grad for p in layer.parameters()]
    found["state"] = dict(layer.state_dict())
    found["random"] = torch.rand(3, device=device)
    found["evaluated"] = layer.eval()(batch(case, 99, device)[0]).detach()
    return found


COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all_single", "barrier")


@contextmanager
def recorded():
    """Every collective that is called meanwhile, and its bytes."""
    calls = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def watched(name):
        def call(tensor, *args, **options):
            calls.append((name, tensor.numel() * tensor.element_size()))
            return originals[name](tensor, *args, **options)

        return call

    for name in originals:
        setattr(dist, name, watched(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic(rank, pair):
    """The collectives of a training step, and of all that must send nothing."""

    def norm(**options):
        return mixnorm.MixtureNorm2d(16, max_samples=128, backend="reference", **{"process_group": "world", **options})

    layer = norm()
    x = torch.randn(16 + rank, 16, 4, 4, requires_grad=True)
    found = {}
    with recorded() as found["forward"]:
        y = layer(x)
    with recorded() as found["backward"]:
        y.backward(torch.randn(y.shape))
    with recorded() as found["warm"]:
        norm(seeding="warm")(x.detach())
    with recorded() as found["silent"]:
        layer.eval()(x).sum().backward()
        mixnorm.freeze(layer).train()(x)
        for options in ({"population": "instance"}, {"population": "layer"}, {"population": "group", "num_groups": 2}):
            norm(**options)(x).sum().backward()
        norm(process_group=None)(x).sum().backward()
        norm(track_running_stats=False).eval()(x)
    alone = [dist.new_group([r]) for r in range(4)][rank]
    with recorded() as found["alone"]:
        norm(process_group=alone)(x).sum().backward()
    return found


def copies(rank, pair):
    """What a copy and a pickle of a layer with a group hold, and what a process outside of the group is told."""
    layers = [mixnorm.MixtureNorm2d(3, process_group=group) for group in (dist.group.WORLD, "world")]
    found = {
        "world": [
            other.process_group for layer in layers for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)))
        ]
    }
    if rank > 1:
        try:
            mixnorm.MixtureNorm2d(3, process_group=pair)
        except ValueError as error:
            found["outside"] = str(error)
        return found
    layer = mixnorm.MixtureNorm2d(3, process_group=pair)
    found["shared"] = copy.deepcopy(layer).process_group is pair
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found["pickled"] = pickle.loads(pickle.dumps(layer)).process_group
    found["warning"] = str(seen[0].message)
    found["state"] = sorted(layer.state_dict())
    return found


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


PARTS = {
    "traffic": traffic,
    "copies": copies,
    "data parallel": data_parallel,
    "sharded": sharded,
    "broadcast buffers": broadcast_buffers,
    "recalibrated": recalibrated,
    "errors": errors,
    "disagreements": disagreements,
    "silence": silence,
}


def work(rank, world, folder, backend, names, device):
    """The cases and parts of that name on one rank; what it found goes to a file."""
    torch.set_num_threads(1)
    if device != "cpu":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    init = f"file://{folder}/meet"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT))
    pair = dist.new_group([0, 1])
    found = {}
    for name in names:
        if name in PARTS:
            found[name] = PARTS[name](rank, pair)
        elif rank < len(CASES[name].sizes):
            found[name] = run(CASES[name], rank, pair if len(CASES[name].sizes) == 2 else "world", device)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def launch(folder, world=4, backend="gloo", names=(*CASES, *PARTS), device="cpu"):
    """What every rank found; an error if one fails or waits for too long."""
    start_ranks(work, (world, str(folder), backend, names, device), world)
    return read(folder, world)


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


def read(folder, world=4):
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]


def launch_once(base):
    """:func:`launch`, but of several processes that ask for it with the same folder one launches, and all get the result."""
    folder, done = base / "ranks", base / "ranks.done"
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.2)
        return read(folder)
    try:
        return launch(folder)
    finally:
        done.touch()
