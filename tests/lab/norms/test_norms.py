"""The norms to compare with, each against its definition written out in fp64, one group, image or mode at a time."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from norm_helpers import SHAPE, affine, data, gradients, standardized, with_affine
from torch import nn

import mixnorm
from mixnorm_lab import models, norms
from mixnorm_lab.config import norm_names
from mixnorm_lab.norms import BatchNormDropout, BatchRenorm, ModeNorm, ShuffledMixtureNorm

# --- norms of one image -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups"), [("group-2", 2), ("group-6", 6), ("layer", 1), ("instance", 6), ("group-36", 6)]
)
def test_group_layer_and_instance_norm(name, groups):
    x, norm = data(*SHAPE), with_affine(norms.make(name, 6))

    def by_hand(x):
        parts = [standardized(part, (0, 1, 2)) for image in x for part in image.split(6 // groups)]
        return affine(torch.cat(parts).view(x.shape), norm)

    for mode in (True, False):
        torch.testing.assert_close(norm.train(mode)(x), by_hand(x))


@pytest.mark.parametrize(
    ("channels", "name", "sentence"),
    [
        (
            (16, 32),
            "group-5",
            "the 16 channels of '0' cannot be divided into 5 groups, nor those of 1 more: use group-2 or group-4",
        ),
        ((24, 16), "group-32", "the 24 channels of '0' cannot be divided into 32 groups: use group-4 or group-8"),
        ((6, 9), "group-2", "the 9 channels of '1' cannot be divided into 2 groups: use group-3"),
        ((3, 8), "group-4", "the 3 channels of '0' cannot be divided into 4 groups: use layer, which has one group"),
    ],
)
def test_groups_that_do_not_divide_the_channels_are_refused(channels, name, sentence):
    model = nn.Sequential(*map(nn.BatchNorm2d, channels))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        norms.replace_norms(model, name)
    assert all(type(norm) is nn.BatchNorm2d for norm in model)


# --- batch norm with dropout --------------------------------------------------------------------------------------------


def test_dropout_is_behind_the_norm():
    x, norm = data(*SHAPE), with_affine(BatchNormDropout(6, 0.25))
    right = affine(standardized(x, (0, 2, 3)), norm.norm)
    torch.manual_seed(0)
    y = norm(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, F.dropout(right, 0.25))
    kept = y != 0
    assert 0.65 < kept.double().mean() < 0.85
    torch.testing.assert_close(y[kept], right[kept] / 0.75)
    norm.eval()
    torch.testing.assert_close(norm(x), norm.norm(x))


# --- batch renorm -------------------------------------------------------------------------------------------------------


def test_batch_renorm_is_its_algorithm_step_by_step():
    """Algorithm 1 of the paper, with the corners of its ramps at 2, 10 and 16 batches, not thousands of them."""
    norm = with_affine(BatchRenorm(6, warmup=2, momentum=0.2))
    mean, deviation = torch.zeros(6).double(), torch.ones(6).double()
    norm.running_var.fill_(1 - 1e-5)
    bounds = set()
    for batch in range(20):
        x = data(*SHAPE, seed=batch) * (1 + 0.4 * batch) + batch
        r_max = 1 if batch < 2 else 1 + 2 * min(1, (batch - 2) / 14)
        d_max = 0 if batch < 2 else 5 * min(1, (batch - 2) / 8)
        batch_mean = x.mean((0, 2, 3))
        batch_deviation = (((x - batch_mean.view(-1, 1, 1)) ** 2).mean((0, 2, 3)) + 1e-5).sqrt()
        r = (batch_deviation / deviation).clamp(1 / r_max, r_max)
        d = ((batch_mean - mean) / deviation).clamp(-d_max, d_max)
        bounds |= {bool((r == r_max).any()), bool((r < r_max).any())}

        def by_hand(x, r=r, d=d):
            return affine(standardized(x, (0, 2, 3)) * r.view(-1, 1, 1) + d.view(-1, 1, 1), norm)

        expected = gradients(by_hand, x, norm.parameters())
        state = copy.deepcopy(norm.state_dict())
        torch.testing.assert_close(norm(x), by_hand(x))
        norm.load_state_dict(state)
        for ours, right in zip(gradients(norm, x, norm.parameters()), expected, strict=True):
            torch.testing.assert_close(ours, right)
        mean = mean + 0.2 * (batch_mean - mean)
        deviation = deviation + 0.2 * (batch_deviation - deviation)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close((norm.running_var + 1e-5).sqrt(), deviation)
    assert bounds == {True, False}
    x = data(*SHAPE, seed=99)
    torch.testing.assert_close(norm.eval()(x), affine((x - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1), norm))


def test_batch_renorms_ramps_are_the_published_ones():
    norm, steps = BatchRenorm(1), [0, 5000, 15_000, 22_500, 25_000, 40_000, 60_000]
    limits = [tuple(float(limit) for limit in norm.limits(torch.tensor(step))) for step in steps]
    r_max, d_max = zip(*limits, strict=True)
    assert r_max == pytest.approx([1, 1, 1 + 2 * 10 / 35, 2, 1 + 2 * 20 / 35, 3, 3])
    assert d_max == pytest.approx([0, 0, 2.5, 4.375, 5, 5, 5])
    assert norm.momentum == 0.01


# --- shuffled responsibilities ------------------------------------------------------------------------------------------


def test_shuffled_responsibilities_are_the_fits_own_of_other_points(monkeypatch):
    """The transform under a permutation of ν, which is known here; the shares of the components stay."""
    norm, x = with_affine(ShuffledMixtureNorm(6, 3)), data(*SHAPE)
    points, seen = x.movedim(1, -1).flatten(0, -2), {}
    monkeypatch.setattr("mixnorm.functional.mixture_normalize", lambda *given: seen.setdefault("given", given)[0])
    torch.manual_seed(0)
    norm(x)
    shuffled = seen["given"][1]
    torch.manual_seed(0)
    mixture = mixnorm.gmm.fit_mixture(points, 3, sample_fraction=0.25, max_samples=4096, min_variance=1e-5)
    own = mixture.responsibilities(points)
    assert not torch.allclose(shuffled, own)
    torch.testing.assert_close(shuffled.sort(0).values, own.sort(0).values)
    torch.testing.assert_close(norm.running_scale, 0.9 + 0.1 * own.mean(0).sqrt().sum(), check_dtype=False)
    torch.testing.assert_close(norm.running_mean, 0.1 * points.mean(0))


def test_shuffled_responsibilities_have_the_mean_of_training_in_evaluation():
    norm, x = with_affine(ShuffledMixtureNorm(6, 3, momentum=None)), data(200, 6, 4, 3)
    torch.manual_seed(0)
    outputs = torch.stack([norm(x).detach() for _ in range(200)])
    found, spread = norm.eval()(x).detach(), outputs.std(0) / 200**0.5
    assert ((outputs.mean(0) - found).abs() < 6 * spread + 0.02 * found.abs() + 0.02).all()


# --- mode norm ----------------------------------------------------------------------------------------------------------


def modes_by_hand(norm, x, moments=None):
    """Image by image and mode by mode; the first and second moments (K, C) are the batch's, unless given, and returned."""
    gates = []
    for image in x:
        scores = [norm.gate.bias[k] + (norm.gate.weight[k] * image.mean((1, 2))).sum() for k in range(norm.modes)]
        weights = torch.stack(scores).exp()
        gates.append(weights / weights.sum())
    first, second = [], []
    for k in range(norm.modes):
        total = sum(gate[k] for gate in gates)
        first.append(sum(gate[k] * image.mean((1, 2)) for gate, image in zip(gates, x, strict=True)) / total)
        second.append(sum(gate[k] * (image**2).mean((1, 2)) for gate, image in zip(gates, x, strict=True)) / total)
    mine = torch.stack(first), torch.stack(second)
    first, second = moments or mine
    out = []
    for gate, image in zip(gates, x, strict=True):
        y = 0
        for k in range(norm.modes):
            deviation = (second[k] - first[k] ** 2 + 1e-5).sqrt()
            y = y + gate[k] * (image - first[k].view(-1, 1, 1)) / deviation.view(-1, 1, 1)
        out.append(y)
    return affine(torch.stack(out), norm), mine


@pytest.mark.parametrize("modes", [1, 2, 3])
def test_mode_norm_is_its_algorithm(modes):
    torch.manual_seed(0)
    norm = with_affine(ModeNorm(6, modes))
    moments = torch.zeros(modes, 6).double(), torch.ones(modes, 6).double()
    for seed in range(3):
        x = data(*SHAPE, seed=seed)
        expected, mine = modes_by_hand(norm, x)
        torch.testing.assert_close(norm(x), expected)
        moments = tuple(0.9 * old + 0.1 * new.detach() for old, new in zip(moments, mine, strict=True))
    torch.testing.assert_close(norm.running_mean, moments[0])
    torch.testing.assert_close(norm.running_var, moments[1] - moments[0] ** 2)
    expected = gradients(lambda x: modes_by_hand(norm, x)[0], x, norm.parameters())
    for ours, right in zip(gradients(norm, x, norm.parameters()), expected, strict=True):
        torch.testing.assert_close(ours, right)
    norm = norm.eval()
    moments = norm.running_mean, norm.running_var + norm.running_mean**2
    torch.testing.assert_close(norm(x), modes_by_hand(norm, x, moments)[0])


def test_mode_norms_gradient_goes_through_the_gates():
    torch.manual_seed(0)
    norm = with_affine(ModeNorm(2, 2))
    names, parameters = zip(*norm.named_parameters(), strict=True)

    def function(x, *values):
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (data(4, 2, 2, 2).requires_grad_(), *parameters))
    assert all((gradient != 0).any() for gradient in gradients(norm, data(4, 2, 2, 2), [norm.gate.weight]))


def test_one_mode_is_batch_norm():
    x, norm = data(*SHAPE), with_affine(ModeNorm(6, 1))
    torch.testing.assert_close(norm(x), affine(standardized(x, (0, 2, 3)), norm))


# --- all of them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", norm_names.EXAMPLES)
@pytest.mark.parametrize("shape", [(8, 6, 5), SHAPE, (4, 6, 2, 3, 2)])
def test_any_number_of_dimensions_and_memory_format(name, shape):
    torch.manual_seed(0)
    norm, x = norms.make(name, 6).double(), data(*shape)
    if isinstance(norm, BatchNormDropout):
        norm.dropout.p = 0.0  # which value is dropped depends on its place in memory
    outputs = []
    for formatted in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x):
        torch.manual_seed(1)
        y = copy.deepcopy(norm)(formatted)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        outputs.append(y)
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("name", ["ghost-4", "parabola-4", "enhanced", "renorm", "mode-2", "group-2"])
def test_autocast_keeps_statistics_in_fp32(name):
    torch.manual_seed(0)
    norm = norms.make(name, 6)
    x = (data(*SHAPE) + 20).bfloat16()
    exact = copy.deepcopy(norm).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert (y.double() - exact).abs().max() < 0.02  # a rounding of the result alone


@pytest.mark.parametrize("name", ["ghost-4", "parabola-4", "enhanced-4", "renorm", "mode-2", "shuffled-2", "dropout-0.1"])
def test_the_memory_format_stays(name):
    x = torch.randn(SHAPE).to(memory_format=torch.channels_last).requires_grad_()
    y = norms.make(name, 6)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", norm_names.EXAMPLES)
def test_every_batch_norm_of_a_model_is_replaced_and_keeps_its_parameters(name):
    model = models.build("digits-cnn", 10)
    before = {place: parameter for place, parameter in model.named_parameters() if ".norm" in place}
    norms.replace_norms(model, name)
    inside = {type(norm) for norm in model.modules()} & {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
    assert not inside
    after = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in after for parameter in before.values())
    model(torch.randn(8, 1, 8, 8)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    other = norms.replace_norms(models.build("digits-cnn", 10), name)
    other.load_state_dict(state)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_some_batch_norms_are_replaced_and_a_wrong_name_says_what_there_is():
    model = norms.replace_norms(models.build("digits-cnn", 10), "layer", ["conv1", "conv3.*"])
    kinds = [type(model.get_submodule(f"conv{i}.norm")) for i in (1, 2, 3)]
    assert kinds == [nn.GroupNorm, nn.BatchNorm2d, nn.GroupNorm]
    with pytest.raises(ValueError, match=r"'conv9' matches no batch norm: the model has conv2\.norm$"):
        norms.replace_norms(model, "layer", ["conv9"])


@pytest.mark.parametrize("name", ["ghost-4", "parabola-4", "enhanced-4", "renorm", "mode-2", "dropout-0.5"])
def test_statistics_are_refilled_from_data(name):
    """As batch norm's are: the plain mean over the batches, with nothing random."""
    model = nn.Sequential(norms.make(name, 6)).double()
    batches = [data(*SHAPE, seed=seed) for seed in range(3)]
    mixnorm.recalibrate(model, batches)
    [mean] = [value for key, value in model.state_dict().items() if key.endswith("running_mean")]
    if name != "mode-2":
        torch.testing.assert_close(mean, torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0))
    assert int(next(v for k, v in model.state_dict().items() if k.endswith("tracked"))) == 3


@pytest.mark.parametrize("name", ["ghost-4", "parabola-4", "enhanced", "renorm", "mode-1"])
def test_without_a_momentum_statistics_are_the_plain_mean(name):
    norm, batches = norms.make(name, 6).double(), [data(*SHAPE, seed=seed) for seed in range(3)]
    norm.momentum = None
    for x in batches:
        norm(x)
    mean = torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0)
    torch.testing.assert_close(norm.running_mean.view(6), mean)


@pytest.mark.parametrize("name", norm_names.EXAMPLES)
def test_nothing_is_read_back_from_the_device(name):
    """A step on the meta device, where there is nothing to read, as a CUDA graph must not."""
    with torch.device("meta"):
        norm, x = norms.make(name, 64), torch.randn(64, 64, 4, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gost-32", r"there is no norm 'gost-32': use ghost-32"),
        ("ghost", r"the norm 'ghost' lacks its number: write ghost-32"),
        ("layer-2", r"the norm 'layer-2' has no number: write layer"),
        ("ghost-0", r"must be a whole number from 1 on: write it as ghost-32"),
        ("ghost-1.5", r"must be a whole number"),
        ("dropout-1", r"must be a share between 0 and 1: write it as dropout-0.1"),
        ("?", "use batch or mixture or ghost-32 or parabola-32 or group-32 or layer"),
    ],
)
def test_an_unknown_norm_is_answered_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        norm_names.parse(name)


def test_what_a_report_calls_them():
    told = [norm_names.parse(name).text() for name in norm_names.EXAMPLES]
    assert told == [
        "ghost batch norm, groups of 32 images", "ghost batch norm with a parabola, groups of 32 images",
        "group norm, 32 groups of channels", "layer norm", "instance norm",
        "instance-enhanced batch norm", "batch renorm", "mode norm, 2 modes",
        "mixture norm with shuffled responsibilities, K = 3", "batch norm with dropout of 0.1",
    ]  # fmt: skip
    assert norm_names.parse("ghost-8").text("rows") == "ghost batch norm, groups of 8 rows"
    assert norm_names.parse("enhanced-32").text() == "instance-enhanced batch norm, groups of 32 images"
    assert norm_names.parse("renorm-500").text() == "batch renorm, as batch norm for 500 steps"
