"""ReLU and max pooling of the CIFAR CNN: the two orders, and the kernel, against PyTorch's operations one by one."""

import pytest
import torch
import torch.nn.functional as F

from mixnorm_lab.models.relu_max_pool import SIZE, STRIDE, relu_max_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs under the interpreter, see conftest.py
SHAPES = [(2, 3, 8, 8), (3, 5, 7, 6), (1, 16, 4, 9), (2, 2, 3, 3), (1, 4, 2, 5)]


def kernel(x):
    pytest.importorskip("triton")
    from mixnorm_lab.models.relu_max_pool_kernel import ReluMaxPool

    return ReluMaxPool.apply(x, SIZE, STRIDE)


def one_by_one(x):
    return F.max_pool2d(F.relu(x), 3, stride=2, ceil_mode=True)


def with_gradient(function, x, grad):
    x = x.clone(memory_format=torch.channels_last).requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


def inputs(shape, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    return x, torch.randn_like(one_by_one(x))


@pytest.mark.parametrize("function", [relu_max_pool, kernel])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_relu_then_pooling(function, shape):
    x, grad = inputs(shape)
    for ours, right in zip(with_gradient(function, x, grad), with_gradient(one_by_one, x, grad), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    x, grad = inputs((2, 8, 8, 8), dtype)
    out, grad_x = with_gradient(kernel, x, grad)
    right, right_grad = with_gradient(one_by_one, x.double(), grad.double())
    assert out.dtype == grad_x.dtype == dtype
    assert torch.equal(out.double(), right)  # a maximum is one of its values
    torch.testing.assert_close(grad_x.double(), right_grad, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("function", [relu_max_pool, kernel])
def test_the_first_of_equal_values_has_the_gradient_and_zeros_have_none(function):
    x, grad = inputs((2, 4, 8, 8))
    x = x.round()  # many ties, and windows without a positive value
    x[0] = -1.0
    for ours, right in zip(with_gradient(function, x, grad), with_gradient(one_by_one, x, grad), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [relu_max_pool, kernel])
def test_what_is_not_a_number_stays_one(function):
    x, _ = inputs((1, 2, 8, 8))
    x[0, 1, 3, 4] = float("nan")
    out = function(x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(out.isnan(), one_by_one(x).isnan())
    assert out.isnan().any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [(256, 64, 32, 32), (256, 128, 16, 16), (256, 128, 8, 8)], ids=str)
def test_the_layers_of_the_cifar_cnn_on_a_gpu(shape):
    x, grad = inputs(shape)
    taken = with_gradient(relu_max_pool, x, grad)
    for ours, right in zip(taken, with_gradient(one_by_one, x, grad), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert type(relu_max_pool(x).grad_fn).__name__ == "ReluMaxPoolBackward"
