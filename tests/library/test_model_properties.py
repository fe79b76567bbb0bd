"""Any model at all: random convolutions and mixture norms, in random steps of training and evaluation.

Beside each norm of a model a copy of it runs in plain PyTorch, on the same input and under the same gradient, so that
what a model does to a norm's tensors, as in place, shows. ``make test-nightly`` draws 2,000 cases; the tests draw a few.
"""

import copy
import math
import os
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d, gmm
from mixnorm.ops.kernels import Mixture

CASES = int(os.environ.get("MIXNORM_MODEL_CASES", "19"))
drawn = {"deadline": None, "derandomize": CASES == 19, "suppress_health_check": list(HealthCheck)}
pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* points is too small")

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
LAYERS = {1: (nn.Conv1d, MixtureNorm1d), 2: (nn.Conv2d, MixtureNorm2d), 3: (nn.Conv3d, MixtureNorm3d)}
POOLS = {
    "max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
    "mean": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
}
LARGEST = {1: 24, 2: 8, 3: 5}  # of an image
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
ROUNDING = {FP32: 1e-5, BF16: 1e-2, FP64: 1e-9}  # of the largest number, beside the error of plain PyTorch
MOST_OFF = 3.0  # what the outputs of evaluation may be larger or smaller than those of training

FORMS = (
    {},
    {},
    {"scale": "unit"},
    {"scale": "unit", "within": "learned", "between": "learned"},
    {"scale": "unit", "within": 0.4, "between": 0.8},
    {"deviation": "learned"},
    {"scale": "unit", "component_affine": True},
)
NORMS = st.fixed_dictionaries(
    {
        "num_components": st.integers(1, 5),
        "em_iters": st.integers(0, 3),
        "seeding": st.sampled_from(["kmeans++", "warm"]),
        "sample_fraction": st.sampled_from([0.1, 0.25, 1.0]),
        "max_samples": st.sampled_from([None, 5, 24, 4096]),
        "history": st.integers(1, 4),
        "momentum": st.sampled_from([0.1, None, 0.5, 0.0]),
        "inference": st.sampled_from(["ensemble", "mixture", "paper", "pooled", "steady"]),
        "affine": st.sampled_from([True, True, False]),
        "bias": st.booleans(),
        "affine_mode": st.sampled_from(["output", "output", "statistics"]),
        "activation": st.sampled_from([None, None, "relu", "leaky_relu", "silu", "gelu"]),
        "population": st.sampled_from(["batch", "batch", "batch", "channel", "instance", "layer", "group"]),
        "track_running_stats": st.sampled_from([True, True, True, False]),
        "form": st.sampled_from(FORMS),
    }
)
BLOCKS = st.fixed_dictionaries(
    {
        "channels": st.sampled_from([2, 4, 6]),
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "padding": st.integers(0, 2),
        "groups": st.sampled_from(["one", "two", "each"]),
        "bias": st.booleans(),
        "norm": NORMS,
        "behind": st.sampled_from([None, "relu", "relu in place", "silu"]),
        "pool": st.sampled_from([None, None, "max", "mean"]),
        "residual": st.sampled_from(["no", "sum", "sum in place"]),
    }
)


def computed_right(plan):
    """The plan, in fp32 where oneDNN's convolution of volumes in bf16 would read memory that was never written."""
    return plan | {"dtype": FP32} if plan["rank"] == 3 and plan["dtype"] == BF16 else plan


PLANS = st.fixed_dictionaries(
    {
        "rank": st.integers(1, 3),
        "inputs": st.sampled_from([1, 2, 4]),
        "blocks": st.lists(BLOCKS, min_size=1, max_size=3),
        "dtype": st.sampled_from([FP32, FP64, BF16]),
        "channels_last": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
).map(computed_right)
KINDS_OF_STEPS = (
    "train",
    "train",
    "train",
    "train without gradient",
    "evaluate",
    "evaluate with gradient",
    "copy",
    "state dict",
    "recalibrate",
    "freeze",
    "unfreeze",
)
# What to do, with how many images, and how much smaller they are than the largest.
STEPS = st.lists(st.tuples(st.sampled_from(KINDS_OF_STEPS), st.integers(1, 9), st.integers(0, 3)), min_size=2, max_size=7)


def plainly(norm, x):
    return norm(x)


class Block(nn.Module):
    def __init__(self, rank, inputs, plan, first, dtype):
        super().__init__()
        conv, norm = LAYERS[rank]
        channels, kernel, options = plan["channels"], plan["kernel_size"], dict(plan["norm"])
        # No block but the first makes an image of one point smaller, and no point is of padding alone.
        padding = min(max(plan["padding"], 0 if first else kernel // 2), kernel - 1)
        most = math.gcd(inputs, channels)
        groups = {"one": 1, "two": min(2, most), "each": most}[plan["groups"]]
        self.conv = conv(inputs, channels, kernel, plan["stride"], padding, groups=groups, bias=plan["bias"])
        form = options.pop("form")
        if options["affine_mode"] == "output" and options["inference"] != "paper":
            warm = options["seeding"] == "warm" and options["inference"] != "pooled"
            kept = options["track_running_stats"] and options["momentum"] != 0 and options["population"] == "batch"
            if "component_affine" not in form or (warm and kept and options["affine"]):
                options |= form
        if options["population"] == "group":
            options["num_groups"] = 2
        self.norm = norm(channels, **options)
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        self.rank, self.plan = rank, plan

    def forward(self, x, call):
        y = call(self.norm, self.conv(x))
        behind, pool, residual = (self.plan[name] for name in ("behind", "pool", "residual"))
        if behind == "silu":
            y = F.silu(y)
        elif behind is not None:
            y = F.relu(y, inplace=behind == "relu in place")
        if residual != "no" and y.shape == x.shape:
            if residual == "sum in place" and behind in (None, "silu"):  # the gradient of a ReLU needs its output
                y += x
            else:
                y = y + x
        if pool is not None and min(y.shape[2:]) >= 2:
            y = POOLS[pool][self.rank - 1](y, 2)
        return y


class Model(nn.Module):
    """Blocks of a convolution, a norm and more, as a plan says."""

    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(plan["seed"])
        widths = [plan["inputs"], *(block["channels"] for block in plan["blocks"])]
        self.blocks = nn.ModuleList()
        for width, block in zip(widths, plan["blocks"], strict=False):
            self.blocks.append(Block(plan["rank"], width, block, len(self.blocks) == 0, plan["dtype"]))
        self.autocast = plan["dtype"] == BF16
        self.to(FP64 if plan["dtype"] == FP64 else FP32)
        if plan["channels_last"] and plan["rank"] in CHANNELS_LAST:
            self.to(memory_format=CHANNELS_LAST[plan["rank"]])

    def forward(self, x, call=plainly):
        with torch.autocast("cpu", BF16, enabled=self.autocast):
            for block in self.blocks:
                x = block(x, call)
        return x


def images(plan, count, seed, smaller=0):
    """Images with two modes, the points of one at about 3."""
    g = torch.Generator().manual_seed(1000 * plan["seed"] + seed)
    rank = plan["rank"]
    size = [max(3, LARGEST[rank] - smaller * (axis + 1)) for axis in range(rank)]
    x = torch.randn((count, plan["inputs"], *size), generator=g, dtype=FP64)
    x = x + 3 * torch.randint(0, 2, (count, 1, *size), generator=g)
    x = x.to(FP64 if plan["dtype"] == FP64 else FP32)
    if plan["channels_last"] and rank in CHANNELS_LAST:
        x = x.contiguous(memory_format=CHANNELS_LAST[rank])
    return x


def upstream(y, seed):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(y.dtype)


def one_sentence(error):
    return len(str(error)) > 20 and "\n" not in str(error)


def refuses(call):
    """Whether a call is refused, in one sentence."""
    errors = []
    try:
        call()
    except ValueError as error:
        errors.append(error)
    assert all(map(one_sentence, errors))
    return bool(errors)


def points_of(norm, x):
    """How many points each mixture is of."""
    numbers = {"batch": x.shape[1], "channel": x.shape[1], "instance": x.shape[0] * x.shape[1], "layer": x.shape[0]}
    return x.numel() // numbers.get(norm.population, x.shape[0] * (norm.num_groups or 1))


def laid_out_as(y, x):
    """Whether y has the memory format of x; a tensor may have several."""
    if x.is_contiguous():
        return y.is_contiguous()
    return x.dim() < 4 or y.is_contiguous(memory_format=CHANNELS_LAST[x.dim() - 2])


@contextmanager
def fits(replace=None):
    """The mixtures that are fitted meanwhile, or those that are given in place of them."""
    fit, found = gmm.fit_points, []

    def kept(*arguments):
        found.append(fit(*arguments))
        return found[-1]

    def given(points, *_):
        sample, mixture = replace[len(found)]
        dtype = torch.promote_types(points.dtype, FP32)
        found.append((sample.to(dtype), Mixture(*(t.to(dtype) for t in mixture))))
        return found[-1]

    gmm.fit_points = kept if replace is None else given
    try:
        yield found
    finally:
        gmm.fit_points = fit


def assert_as_accurate(what, found, plain, exact, dtype, largest=0.0):
    """An error against fp64 of at most four times that of plain PyTorch, beside a rounding of the largest number.

    ``largest``: of the numbers that may have cancelled, of which four roundings of fp32 are allowed beside that.
    """
    if exact.numel() == 0:
        return
    error, usual = ((t.double() - exact).abs().max().item() for t in (found, plain))
    allowed = 4 * usual + ROUNDING[dtype] * max(1.0, exact.abs().max().item())
    if dtype != FP64:
        allowed += 2**-22 * largest
    assert error <= allowed, f"{what}: error {error:.3g}, plain PyTorch's {usual:.3g}, allowed {allowed:.3g}"


class Beside:
    """Calls norms, and beside each one its copies in plain PyTorch: in the same dtype, and in fp64.

    Both copies get its mixture: where last digits differ, k-means++ may choose another, and of points that are equal any.
    """

    def __init__(self):
        self.waiting = []

    def __call__(self, norm, x):
        if norm.training and points_of(norm, x) == 1:
            with pytest.raises(ValueError, match="expected more than 1 value per channel") as caught:
                norm(x)
            assert one_sentence(caught.value)
            raise TooFewPointsError
        norm._pooled = None  # what an evaluation has fitted, the copy would not fit
        copies = [copy.deepcopy(norm), copy.deepcopy(norm).double()][: 1 if x.dtype == FP64 else 2]
        leaves = [x.detach().clone().to(dtype) for dtype in (x.dtype, FP64)[: len(copies)]]
        before = torch.get_rng_state()
        with fits() as found:
            y = norm(x)
        after = torch.get_rng_state()
        outputs = []
        for other, leaf in zip(copies, leaves, strict=True):
            other.backend = "reference"
            leaf.requires_grad_(x.requires_grad)
            torch.set_rng_state(before)
            with fits(found):
                outputs.append(other(leaf))
            if other is copies[0]:
                assert torch.equal(torch.get_rng_state(), after)
        torch.set_rng_state(after)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.isfinite().all()
        assert laid_out_as(y, x)
        assert y.requires_grad == outputs[0].requires_grad
        with torch.no_grad():
            assert_as_accurate("output", y, outputs[0], outputs[-1], x.dtype)
        states = [dict(m.named_buffers()) for m in (norm, copies[0], copies[-1])]
        for name in states[0]:
            if states[0][name].is_floating_point():
                plain = [torch.nan_to_num(state[name], nan=-1.0) for state in states]  # a slot without samples
                square = x.detach().double().square().max().item()
                assert_as_accurate(name, *plain, FP32 if x.dtype == BF16 else x.dtype, square)
            else:
                assert torch.equal(states[0][name], states[1][name])
        if y.requires_grad:
            grads = {}
            y.register_hook(lambda grad: grads.update(output=grad.clone()))
            if x.requires_grad:
                x.register_hook(lambda grad: grads.update(input=grad.clone()))
            self.waiting.append((norm, x, grads, copies, leaves, outputs))
        return y

    def check_gradients(self):
        for norm, x, grads, copies, leaves, outputs in self.waiting:
            expected = []
            for other, leaf, y in zip(copies, leaves, outputs, strict=True):
                inputs = [leaf, *other.parameters()] if leaf.requires_grad else [*other.parameters()]
                expected.append(torch.autograd.grad(y, inputs, grads["output"].to(y.dtype), allow_unused=True))
            found = [p.grad for p in norm.parameters()]
            if x.requires_grad:
                assert grads["input"].dtype == x.dtype
                assert laid_out_as(grads["input"], x)
                found.insert(0, grads["input"])
            # A point with a component of its own has no gradient: there all that comes through the transform cancels.
            slope = math.sqrt(points_of(norm, x) / norm.eps)
            if norm.weight is not None:
                slope *= max(1.0, norm.weight.abs().max().item())
            # At a kink a gradient jumps, and rounding decides on which side a point is that equals its mean.
            smooth = norm.activation not in ("relu", "leaky_relu")
            for g, plain, exact in zip(found, expected[0], expected[-1], strict=True):
                assert (g is None) == (plain is None)
                assert g is None or g.isfinite().all()
                if g is not None and smooth:
                    largest = slope * grads["output"].abs().max().item()
                    assert_as_accurate("gradient", g, plain, exact, x.dtype, largest)
        self.waiting = []


class TooFewPointsError(Exception):
    """A norm has refused a batch, as it should."""


def evaluate(model, x):
    with torch.no_grad():
        return model.eval()(x)


def take(step, model, plan, count, smaller, seed):
    """One step; the model to go on with."""
    x = images(plan, count, seed, smaller)
    beside = Beside()
    torch.manual_seed(seed)
    if step == "freeze":
        return mixnorm.freeze(model)
    if step == "unfreeze":
        return mixnorm.unfreeze(model)
    if step == "copy":
        other = copy.deepcopy(model)
        assert torch.equal(evaluate(model, x), evaluate(other, x))
        return other
    if step == "state dict":
        other = Model(plan)
        other.load_state_dict(model.state_dict())
        assert torch.equal(evaluate(model, x), evaluate(other, x))
        return other
    if step == "recalibrate":
        before = copy.deepcopy(model.state_dict())
        if refuses(lambda: mixnorm.recalibrate(model, [x, images(plan, 9 - count + 1, seed + 500)])):
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
        return model
    model.train(step.startswith("train"))
    model.zero_grad()
    with torch.set_grad_enabled("without" not in step and step != "evaluate"):
        y = model(x.requires_grad_(seed % 2 == 0), beside)
    assert y.isfinite().all()
    if y.requires_grad:
        y.backward(upstream(y, seed))
        beside.check_gradients()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad.clamp(-1, 1)
    return model


def describes(norm, x):
    """Whether evaluation of such points must be near their training."""
    if not norm.keeps_history or norm.momentum == 0 or norm.inference not in ("ensemble", "steady"):
        return False
    return norm.affine_mode == "output" and points_of(norm, x) >= 32 * norm.num_components


def check_evaluation(model, plan):
    """After batches of all sizes, and of one size: evaluation is finite, repeats itself, and is as large as training."""
    mixnorm.unfreeze(model)
    x = images(plan, 9, 900)
    first, second = evaluate(model, x), evaluate(model, x)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    sizes, alike = [], []

    def measured(norm, x):
        y = norm(x)
        alike.append(describes(norm, x))
        sizes.append(y.double().square().mean().sqrt().item())
        return y

    with torch.no_grad():
        torch.manual_seed(900)
        if refuses(lambda: mixnorm.recalibrate(model, [images(plan, 9, 901 + i) for i in range(4)])):
            return
        if refuses(lambda: copy.deepcopy(model).train()(x, measured)):
            return
        training, sizes[:] = list(sizes), []
        model.eval()(x, measured)
    for before, after, known in zip(training, sizes, alike, strict=False):
        if not known:
            break
        assert before / MOST_OFF <= after <= before * MOST_OFF, (before, after)


@settings(max_examples=CASES, **drawn)
@given(PLANS, STEPS)
def test_each_norm_of_a_model_does_what_its_copy_in_plain_pytorch_does(plan, steps):
    model = Model(plan)
    for seed, (step, count, smaller) in enumerate(steps):
        try:
            model = take(step, model, plan, count, smaller, seed)
        except TooFewPointsError:
            continue
    check_evaluation(model, plan)


@pytest.mark.slow
@settings(max_examples=CASES // 19, **drawn)
@given(PLANS, st.sampled_from([None, True]), st.lists(st.integers(2, 9), min_size=2, max_size=2, unique=True))
def test_a_compiled_model_computes_what_it_does_without_a_compiler(plan, dynamic, counts):
    torch._dynamo.reset()
    # A layer that goes on from its last batch draws other random numbers when it is compiled.
    blocks = [block | {"norm": block["norm"] | {"seeding": "kmeans++"}} for block in plan["blocks"][:2]]
    # In fp64 rounding does not decide which points k-means++ chooses.
    plan = plan | {"blocks": blocks, "dtype": FP64}
    plain = Model(plan)
    other = copy.deepcopy(plain)
    one_graph = all(block["norm"]["inference"] != "pooled" for block in blocks)  # which fits its mixture in evaluation
    compiled = torch.compile(other, fullgraph=one_graph, backend="aot_eager", dynamic=dynamic)
    for training in (True, False):
        plain.train(training)
        other.train(training)
        for seed, count in enumerate(counts):
            found = []
            if training and refuses(lambda: copy.deepcopy(plain)(images(plan, count, seed, smaller=seed))):  # noqa: B023
                return
            for model, forward in ((plain, plain), (other, compiled)):
                x = images(plan, count, seed, smaller=seed).requires_grad_()
                model.zero_grad()
                torch.manual_seed(seed)
                y = forward(x)
                y.backward(upstream(y, seed))
                found.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
            assert found[0][0].stride() == found[1][0].stride()
            torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8, equal_nan=True)
    torch._dynamo.reset()
