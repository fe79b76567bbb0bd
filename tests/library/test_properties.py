"""Any input at all: random shapes, layouts, dtypes, values and options give a right result or a ValueError that says why.

``make test-nightly`` draws at least 10,000 cases; the tests draw a few hundred.
"""

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

CASES = int(os.environ.get("MIXNORM_PROPERTY_CASES", "200"))
drawn = settings(max_examples=CASES, deadline=None, derandomize=CASES == 200, suppress_health_check=list(HealthCheck))

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-4, torch.float64: 1e-9, torch.float16: 5e-3, torch.bfloat16: 4e-2}
LAYERS = {2: MixtureNorm1d, 3: MixtureNorm1d, 4: MixtureNorm2d, 5: MixtureNorm3d}
KINDS = ("normal", "large mean", "huge", "tiny", "denormal", "constant", "duplicates", "nan", "inf", "many scales")
LAYOUTS = ("contiguous", "channels last", "every second", "transposed", "expanded")

OPTIONS = st.fixed_dictionaries(
    {
        "num_components": st.integers(1, 5),
        "em_iters": st.integers(0, 4),
        "seeding": st.sampled_from(["kmeans++", "warm", 1]),
        "sample_fraction": st.sampled_from([0.05, 0.25, 1.0]),
        "max_samples": st.sampled_from([None, 1, 7, 4096]),
        "min_weight": st.sampled_from([0.0, 0.01, 0.4]),
        "history": st.integers(1, 3),
        "momentum": st.sampled_from([None, 0.1, 1.0]),
        "inference": st.sampled_from(["ensemble", "mixture", "paper", "pooled", "steady"]),
        "affine": st.booleans(),
        "affine_mode": st.sampled_from(["output", "statistics"]),
        "activation": st.sampled_from([None, "relu", "leaky_relu", "silu", "gelu"]),
        "population": st.sampled_from(["batch", "batch", "channel", "instance", "layer", "group"]),
        "track_running_stats": st.sampled_from([True, True, True, False]),
        "backend": st.sampled_from(["reference", "auto"]),
        "scale": st.sampled_from(["fisher", "unit"]),
        # The paper's more often than not, because the others do not go with all of the above.
        "within": st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.3, "learned"]),
        "between": st.sampled_from([0.0, 0.0, 0.0, 1.0, 0.7, "learned"]),
        "deviation": st.sampled_from([0.0, 0.0, 0.0, 0.5, "learned"]),
        "component_affine": st.sampled_from([False, False, False, True]),
    }
)
SHAPES = st.integers(2, 5).flatmap(
    lambda rank: st.tuples(st.integers(0, 6), st.integers(1, 6), *[st.integers(0, 5)] * (rank - 2))
)


def values(kind, shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    if kind == "large mean":
        x = x + 100
    elif kind == "huge":
        x = x.clamp(-3, 3) / 3 * largest
    elif kind == "tiny":
        x = x * torch.finfo(dtype).tiny * 100
    elif kind == "denormal":
        x = x * torch.finfo(dtype).tiny / 4
    elif kind == "constant":
        x = torch.full(shape, 0.7, dtype=torch.float64)
    elif kind == "duplicates":
        x = x.round()
    elif kind == "many scales":
        x = x * 10.0 ** torch.randint(-4, 4, shape, generator=g)
    x = x.to(dtype)
    if kind in ("nan", "inf") and x.numel():
        x.view(-1)[seed % x.numel()] = math.nan if kind == "nan" else math.copysign(math.inf, seed % 2 - 0.5)
    return x


def laid_out(x, layout):
    """The same numbers with other strides."""
    if layout == "channels last" and x.dim() >= 4:
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "every second":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "expanded" and len(x):
        return x[:1].expand_as(x)
    return x


def finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


def history(layer):
    """What evaluation goes by. The samples for "pooled" are marked where a slot is empty, and left out here."""
    return [value for name, value in layer.state_dict().items() if name != "history_samples"]


def one_sentence(error):
    return len(str(error)) > 20 and "\n" not in str(error)


@drawn
@given(OPTIONS, SHAPES, st.sampled_from(KINDS), st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_any_batch_gives_a_result_or_says_why_not(options, shape, kind, layout, dtype, seed):
    channels = shape[1]
    if options["population"] == "group":
        options = options | {"num_groups": 2 if channels % 2 == 0 else 1}
    refused = []
    try:
        layer = LAYERS[len(shape)](channels, **options)
    except ValueError as error:
        refused.append(error)
    assert all(map(one_sentence, refused))
    if refused:
        return
    x = laid_out(values(kind, shape, dtype, seed), layout)
    ordinary = kind not in ("nan", "inf", "huge")
    torch.manual_seed(seed)
    for _ in range(2):
        leaf = x.detach().requires_grad_()
        try:
            y = layer(leaf)
        except ValueError as error:
            refused.append(error)
            break
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        grads = torch.autograd.grad(y.sum(), [leaf, *layer.parameters()], allow_unused=True)
        assert grads[0].shape == x.shape
        if ordinary and dtype in (torch.float32, torch.float64):
            assert finite(y.detach(), *(g for g in grads if g is not None))
    assert all(map(one_sentence, refused))
    # Whatever it was, the history holds numbers, and what comes next is normalized.
    assert finite(*history(layer))
    if options["population"] in ("instance", "layer", "group") and len(shape) == 2:
        return  # a sample without positions has one point
    good = torch.randn((4, channels, *[3] * (len(shape) - 2)), generator=torch.Generator().manual_seed(1))
    assert finite(layer(good).detach())
    assert finite(*history(layer))
    layer.eval()
    first, second = layer(good).detach(), layer(good).detach()
    assert torch.equal(first, second)
    assert finite(first)


@drawn
@given(SHAPES, st.sampled_from(KINDS), st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_with_one_component_it_is_batch_norm(shape, kind, layout, dtype, seed):
    x = laid_out(values(kind, shape, dtype, seed), layout)
    points = x.numel() // max(1, x.shape[1])
    if kind in ("nan", "inf", "huge") or points < 2:
        return
    right = F.batch_norm(x.double(), None, None, training=True)
    y = LAYERS[len(shape)](shape[1], num_components=1, backend="reference")(x)
    scale = right.abs().max().clamp_min(1).item()
    # Rounded to the dtype, and before that computed in fp32 from a mean that may be large beside the deviation.
    spread = float((x.double().abs().amax() / (x.double().var(correction=0) + 1e-5).sqrt()).clamp_min(1))
    allowed = ROUNDING[dtype] + (0 if dtype == torch.float64 else 1e-6 * spread)
    torch.testing.assert_close(y.double(), right, rtol=0, atol=allowed * scale)


@drawn
@given(
    SHAPES,
    st.sampled_from(KINDS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.sampled_from(["reference", "auto"]),
    st.integers(0, 2**16),
)
def test_gates_start_as_batch_norm(shape, kind, layout, dtype, components, backend, seed):
    """With any number of components."""
    x = laid_out(values(kind, shape, dtype, seed), layout)
    points = x.numel() // max(1, x.shape[1])
    if kind in ("nan", "inf", "huge") or points < 2:
        return
    right = F.batch_norm(x.double(), None, None, training=True)
    options = {"num_components": components, "within": "learned", "between": "learned", "backend": backend}
    y = LAYERS[len(shape)](shape[1], **options)(x)
    scale = right.abs().max().clamp_min(1).item()
    # As with one component; and each component has a mean of its own, which may be as large.
    spread = float((x.double().abs().amax() / (x.double().var(correction=0) + 1e-5).sqrt()).clamp_min(1))
    allowed = ROUNDING[dtype] + (0 if dtype == torch.float64 else 2e-6 * spread)
    torch.testing.assert_close(y.double(), right, rtol=0, atol=allowed * scale)


def ensemble(x, weights, means, variances, tau, eps):
    """The τ-weighted mean of the T transforms, in numpy and without a shortcut. ``x`` (m, C)."""
    out = np.zeros_like(x)
    for t in np.flatnonzero(tau):
        there = weights[t] > 0
        log = np.full((len(x), len(there)), -np.inf)
        for k in np.flatnonzero(there):
            wide = np.maximum(variances[t, k], eps)
            log[:, k] = np.log(weights[t, k]) - 0.5 * (np.log(wide) + (x - means[t, k]) ** 2 / wide).sum(1)
        resp = np.exp(log - log.max(1, keepdims=True))
        resp /= resp.sum(1, keepdims=True)
        for k in np.flatnonzero(there):
            hat = (x - means[t, k]) / np.sqrt(variances[t, k] + eps)
            out += tau[t] * resp[:, k : k + 1] / np.sqrt(weights[t, k]) * hat
    return out


@drawn
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.sampled_from([None, 0.1, 0.5]), st.integers(0, 2**16))
def test_evaluation_is_the_mean_of_the_transforms(channels, history, batches, momentum, seed):
    g = torch.Generator().manual_seed(seed)
    layer = MixtureNorm1d(channels, history=history, momentum=momentum, backend="reference").double()
    layer.bounded = False  # these batches differ in their scale
    torch.manual_seed(seed)
    for _ in range(batches):
        layer(torch.randn(40, channels, generator=g, dtype=torch.float64) * torch.rand(1, generator=g) * 5)
    x = torch.randn(30, channels, generator=g, dtype=torch.float64) * 3
    ages = np.arange(history)[::-1]  # the newest slot is the last
    tau = np.where(ages < batches, 1.0 if momentum is None else (1 - momentum) ** ages, 0.0)
    weights, means, variances = (getattr(layer, f"history_{name}").numpy() for name in ("weights", "means", "vars"))
    right = ensemble(x.numpy(), weights, means, variances, tau / tau.sum(), layer.eps)
    torch.testing.assert_close(layer.eval()(x).detach().numpy(), right, rtol=1e-8, atol=1e-8)
