"""The optimizers of the paper, against their rules written out in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from mixnorm import MixtureNorm2d
from mixnorm_lab.config.parts.optimizer import OPTIMIZERS, Optimizer
from mixnorm_lab.training.optimizers import align_gradients, build_optimizer, follow_rates, set_rate

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU kernels run under the interpreter, see conftest.py


def train_on_numbers(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return parameter.detach().numpy()


def test_rmsprop_is_the_rule_of_the_papers_framework():
    """Chainer: ms = α·ms + (1 − α)·g², p = p − lr·g / (√ms + ε); its weight decay adds rate·p to g first."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], Optimizer("rmsprop", 0.01, 0.1, smoothing=0.8), CPU)
    p, ms = start.copy(), np.zeros(7)
    for g in gradients:
        g = g + 0.1 * p
        ms = 0.8 * ms + 0.2 * g * g
        p = p - 0.01 * g / (np.sqrt(ms) + 1e-8)
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


def test_nesterov_looks_ahead():
    """v = μ·v + g, p = p − lr·(g + μ·v), with the weight decay in g."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], Optimizer("nesterov", 0.01, 0.1, momentum=0.8), CPU)
    p, v = start.copy(), np.zeros(7)
    for g in gradients:
        g = g + 0.1 * p
        v = 0.8 * v + g
        p = p - 0.01 * (g + 0.8 * v)
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


def test_sgd_has_momentum_and_does_not_look_ahead():
    """v = μ·v + g, p = p − lr·v, with the weight decay in g."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], Optimizer("sgd", 0.01, 0.1, momentum=0.8), CPU)
    p, v = start.copy(), np.zeros(7)
    for g in gradients:
        v = 0.8 * v + g + 0.1 * p
        p = p - 0.01 * v
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


def test_adamw_decays_beside_the_gradient():
    """p = p − lr·decay·p, then Adam's step with the gradient alone."""
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(20, 7))
    parameter = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build_optimizer([parameter], Optimizer("adamw", 0.01, 0.1, betas=(0.8, 0.9)), CPU)
    p, m, v = start.copy(), np.zeros(7), np.zeros(7)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p = p - 0.01 * 0.1 * p - 0.01 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    np.testing.assert_allclose(train_on_numbers(optimizer, parameter, gradients), p, rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decayed", ["all", "weights"])
def test_the_weight_decay_leaves_norms_and_biases_out_if_asked(name, decayed):
    """Without gradients of their own, parameters move by the weight decay alone."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), MixtureNorm2d(2), nn.Linear(2, 3))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model.parameters(), Optimizer(name, 0.1, 0.1, decayed=decayed), CPU).step()
    moved = {name for name, parameter in model.named_parameters() if (parameter < 1).all()}
    assert moved == ({"0.weight", "3.weight"} if decayed == "weights" else {name for name, _ in model.named_parameters()})


def test_a_step_takes_the_rate_of_its_number():
    parameter, number = nn.Parameter(torch.zeros(1, dtype=torch.float64)), torch.tensor(0)
    optimizer = build_optimizer([parameter], Optimizer("sgd", 1.0, momentum=0.0), CPU)
    follow_rates(optimizer, torch.tensor([0.5, 0.25, 0.125]), number)
    seen = []
    for _ in range(3):
        seen.append(parameter.item())
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        number += 1
    assert seen == [0.0, -0.5, -0.75]


def test_adams_first_step_is_the_learning_rate():
    parameter = nn.Parameter(torch.zeros(3))
    build = build_optimizer([parameter], Optimizer("adam", 0.01), CPU)
    moved = train_on_numbers(build, parameter, np.array([[5.0, -0.1, 2.0]], dtype=np.float32))
    np.testing.assert_allclose(moved, [-0.01, 0.01, -0.01], rtol=1e-5)


def test_parameters_that_do_not_train_are_left_out_and_the_rate_can_change():
    frozen, parameter = nn.Parameter(torch.ones(1), requires_grad=False), nn.Parameter(torch.ones(1))
    optimizer = build_optimizer([frozen, parameter], Optimizer("nesterov", 0.5, momentum=0.0), CPU)
    set_rate(optimizer, 0.25)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert (frozen.item(), parameter.item()) == (1.0, 0.75)


def test_gradients_take_the_strides_of_their_parameters():
    parameter = nn.Parameter(
        torch.randn(4, 1, 3, 3).as_strided((4, 1, 3, 3), (9, 1, 3, 1))
    )  # channels_last, as cuDNN has it
    other = nn.Parameter(torch.randn(3))
    gradient = torch.randn(4, 1, 3, 3)
    parameter.grad, other.grad = gradient.clone(), torch.randn(3)
    address = other.grad.data_ptr()
    align_gradients(torch.optim.SGD([parameter, other], lr=0.1))
    assert parameter.grad.stride() == parameter.stride() != gradient.stride()
    assert torch.equal(parameter.grad, gradient)
    assert other.grad.data_ptr() == address


def test_the_fused_rmsprop_is_pytorchs():
    pytest.importorskip("triton")
    from mixnorm_lab.training.fused_rmsprop import FusedRMSprop

    torch.manual_seed(0)
    shapes, settled = [(7,), (3, 5), (4, 6, 5, 5)], torch.tensor(0.02, device=DEVICE)
    start = [torch.randn(shape, device=DEVICE) for shape in shapes]
    start[2] = start[2].contiguous(memory_format=torch.channels_last)
    pairs = []
    for kind, lr in ((torch.optim.RMSprop, 0.02), (FusedRMSprop, settled)):
        parameters = [nn.Parameter(values.clone()) for values in start]
        pairs.append((parameters, kind(parameters, lr=lr, alpha=0.8, eps=1e-8, weight_decay=0.1)))
    for _ in range(5):
        gradients = [torch.randn_like(values) for values in start]
        for parameters, optimizer in pairs:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    (right, theirs), (ours, fused) = pairs
    for parameter, other in zip(ours, right, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused.state[parameter]["square_avg"], theirs.state[other]["square_avg"])
        assert fused.state[parameter].keys() == theirs.state[other].keys()
        assert float(fused.state[parameter]["step"]) == 5
