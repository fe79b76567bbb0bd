"""What the tests of the Triton kernels share: where they run, the rule that they are held to, and their points."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, so that there are no kernels to test")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU under the interpreter, see conftest.py
large = pytest.mark.skipif(DEVICE == "cpu", reason="a large shape, for which the interpreter takes minutes")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)

# (B, outer, inner, D, K): one point and a few, sizes that fill no tile, several tiles, a tile for each step of the outer
# axis, more channels than one block, every number of components.
SHAPES = [
    (1, 1, 1, 3, 2),
    (2, 3, 1, 1, 1),
    (3, 2, 3, 7, 3),
    (1, 3, 64, 4, 5),
    (1, 9, 31, 1, 8),
    (2, 5, 13, 16, 16),
    (1, 4, 11, 63, 3),
    (1, 3, 35, 100, 2),
    (1, 2, 7, 130, 2),
    (1, 1, 5, 300, 1),
    *(
        pytest.param(shape, marks=large)
        for shape in [
            (1, 64, 196, 256, 3),
            (1, 256, 64, 448, 3),
            (256, 1, 196, 64, 5),
            (1, 64, 49, 2048, 2),
            (1, 33, 127, 130, 16),
        ]
    ),
]


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count, k):
    return torch.arange(count).mul(7) % k


def make_points(batch, outer, inner, dim, k, *, dtype=FP32, seed=0):
    """Points (B, outer, inner, D) around K centers, near enough for ν to be neither 0 nor 1, and a mixture of about that.

    The centers come closer as D grows, because the distances of all channels add up.
    """
    centers = rand(batch, k, dim, seed=seed) * 2 / dim**0.5
    x = rand(batch, outer * inner, dim, seed=seed + 1) + centers[:, labels(outer * inner, k)]
    weights = torch.softmax(rand(batch, k, seed=seed + 2) / 2, -1)
    means = centers + rand(batch, k, dim, seed=seed + 3) * 0.2 / dim**0.5
    variances = 1 + rand(batch, k, dim, seed=seed + 4).tanh() / (2 * dim**0.5)
    mixture = tuple(t.float().to(DEVICE) for t in (weights, means, variances))
    return x.view(batch, outer, inner, dim).to(dtype).to(DEVICE), mixture


def make_resp(batch, m, k, *, seed=5):
    return torch.softmax(2 * rand(batch, m, k, seed=seed), -1).float().to(DEVICE)


def parameters(dim, *, seed=6):
    """γ, of both signs, and β."""
    return tuple((t / 2).float().to(DEVICE) for t in (rand(dim, seed=seed) + 1, rand(dim, seed=seed + 1)))


# Views of the same numbers in other places: what the populations make of the two memory formats, and what slicing makes.
LAYOUTS = {
    "channels last": lambda x: x.contiguous(),
    "channels first": lambda x: x.mT.contiguous().mT,
    "transposed axes": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "cropped": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    "cropped channels first": lambda x: torch.nn.functional.pad(x.mT, (1, 2, 3, 1))[..., 3:-1, 1:-2].mT,
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}
FORMATS = ("channels last", "channels first")
# Numbers that repeat, as an upstream gradient from a mean or a sum does.
EXPANDED = {
    "one for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "one for each channel": lambda x: x[:1, :1, :1].expand_as(x),
    "one for each sample": lambda x: x[:, :, :1, :1].expand_as(x),
    "one for each point": lambda x: x[..., :1].expand_as(x),
}

ROUNDINGS = 2**-22  # four of fp32


def assert_as_accurate(found, plain, exact, scale=None):
    """The rule for every kernel, for dictionaries of results.

    Its error against fp64 is at most twice that of plain PyTorch in the same dtype, plus four roundings of fp32 of the
    quantity's ``scale``: the largest number that it is computed from, or is, whichever is larger.
    """
    for name, expected in exact.items():
        a, b = found[name], plain[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        error, usual = ((t.double() - expected).abs().max().item() for t in (a, b))
        size = max(expected.abs().max().item(), float((scale or {}).get(name, 0)))
        allowed = 2 * usual + ROUNDINGS * size
        if DEVICE == "cpu" and a.dtype == BF16:  # Triton's interpreter cuts off where a GPU rounds
            allowed += torch.finfo(BF16).eps / 2 * expected.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g}, plain PyTorch's {usual:.3g}, scale {size:.3g}"


def assert_keeps_the_rule(run, *tensors, scale=None):
    """``run(backend, *tensors)`` with the kernels, with plain PyTorch, and with plain PyTorch in fp64."""
    exact = run("reference", *(t if t is None else t.double() for t in tensors))
    assert_as_accurate(run("triton", *tensors), run("reference", *tensors), exact, scale)
