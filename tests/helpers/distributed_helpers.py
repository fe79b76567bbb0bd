"""What each rank does for ``test_distributed.py``: all of it in one launch of four, because a launch costs seconds."""

import copy
import pickle
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from distributed_mistakes import disagreements, errors, silence
from distributed_networks import CHANNELS, broadcast_buffers, data_parallel, recalibrated, sharded
from rank_processes import LIMIT, start_ranks
from torch.utils.checkpoint import checkpoint

import mixnorm


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
    "ahead": Case((3, 2, 0, 4), {"fit": "ahead"}, steps=3),
    "ahead, checkpointed": Case((3, 2), {"fit": "ahead"}, checkpointed=True, steps=3),
    "pooled": Case((3, 2, 0, 4), {"inference": "pooled"}),
    "no affine": Case((3, 2), {"affine": False}),
    "no history": Case((3, 2), {"track_running_stats": False}),
    "compiled loops": Case((3, 0, 4, 2), {"backend": "auto"}),
    "gates": Case((3, 2, 0, 4), {"within": "learned", "between": "learned"}),
    "gates, compiled loops": Case((4, 5), {"within": "learned", "between": "learned", "backend": "auto"}),
    "deviation": Case((3, 2, 0, 4), {"deviation": "learned"}),
    "for each component": Case((3, 4), {"component_affine": True, "seeding": "warm", "scale": "unit"}),
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
            for gate in list(layer.parameters())[2:]:
                gate.uniform_(0.2, 0.8, generator=generator)
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
