"""Which implementation runs: backend="triton" insists and says in a sentence why not, "auto" takes another in silence."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from triton_helpers import DEVICE, rand

from mixnorm import MixtureNorm1d, MixtureNorm2d, gmm
from mixnorm.functional import mixture_inference, mixture_normalize

IMAGES = (4, 4, 6, 5)


def images(dtype=torch.float32, device=DEVICE):
    return rand(*IMAGES).to(dtype).to(device)


# What the kernels cannot take: options of the layer, and the dtype of the input.
OBSTACLES = {
    "fp64": ({}, torch.float64, "float64"),
    "17 components": ({"num_components": 17}, torch.float32, "17 components"),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_insisting_is_an_error_of_one_sentence(obstacle, training):
    options, dtype, reason = OBSTACLES[obstacle]
    layer = MixtureNorm2d(4, backend="triton", device=DEVICE, **options).train(training)
    with pytest.raises(RuntimeError, match=reason) as caught:
        layer(images(dtype).repeat(2, 1, 1, 1))  # enough points for 17 components
    message = str(caught.value)
    assert message.startswith("backend='triton' cannot run: ")
    assert message.endswith("use 'auto'")
    assert "\n" not in message
    assert len(message) < 160


def test_a_history_of_any_length():
    slots = 100 if DEVICE == "cuda" else 11  # the interpreter is slow
    layers = [MixtureNorm2d(4, history=slots, backend=backend, device=DEVICE) for backend in ("triton", "reference")]
    layers[0](images())
    layers[1].load_state_dict(layers[0].state_dict())
    torch.testing.assert_close(*(layer.eval()(images()) for layer in layers), atol=1e-5, rtol=1e-5)


def test_more_dimensions_than_the_kernels_hold():
    layer = MixtureNorm1d(5000, num_components=2, backend="triton", device=DEVICE)
    with pytest.raises(RuntimeError, match=r"5000 dimensions.*use 'auto'"):
        layer(rand(8, 5000).float().to(DEVICE))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("obstacle", [*OBSTACLES, "a long history"])
def test_auto_takes_the_reference_in_silence(obstacle, training):
    options, dtype, _ = OBSTACLES.get(obstacle, ({"history": 200}, torch.float32, None))
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in ("auto", "reference"):
            layer = MixtureNorm2d(4, backend=backend, device=DEVICE, **options)
            torch.manual_seed(0)
            x = images(dtype).repeat(2, 1, 1, 1)  # enough points for 17 components
            layer(x)
            torch.manual_seed(0)
            results.append(layer.train(training)(x))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def without_the_interpreter(code):
    """The last line that a new process writes, in which the kernels can only run on a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return result.returncode, (result.stderr.strip() or result.stdout.strip()).splitlines()[-1]


def test_a_tensor_on_the_cpu_without_the_interpreter():
    code = "import torch, mixnorm; mixnorm.MixtureNorm2d(4, backend='triton')(torch.randn(4, 4, 3, 3))"
    failed, message = without_the_interpreter(code)
    assert failed
    assert message == "RuntimeError: backend='triton' cannot run: the input is on 'cpu', not on a GPU; use 'auto'"


def test_auto_on_the_cpu_loads_no_triton():
    code = (
        "import sys, torch, mixnorm; x = torch.randn(4, 4, 3, 3, requires_grad=True); layer = mixnorm.MixtureNorm2d(4);"
        "layer(x).sum().backward(); layer.eval()(x); print('mixnorm.ops.triton' in sys.modules, 'triton' in sys.modules)"
    )
    assert without_the_interpreter(code) == (0, "False False")


def test_without_the_package():
    """As it is on a Mac: the backend that needs it is refused when the layer is made, and nothing else."""
    code = (
        "import sys, importlib.util; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest);"
        "import torch, mixnorm; mixnorm.MixtureNorm2d(4)(torch.randn(4, 4, 3, 3));"
        "mixnorm.MixtureNorm2d(4, backend='triton')"
    )
    failed, message = without_the_interpreter(code)
    assert failed
    assert message == "RuntimeError: backend='triton' needs the package triton: install it, or use 'auto'"


def test_the_functions_take_a_backend():
    x, resp = rand(40, 5).float().to(DEVICE), torch.softmax(rand(40, 3, seed=1), -1).float().to(DEVICE)
    found, expected = (mixture_normalize(x, resp, backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    history = torch.softmax(rand(2, 3, seed=2), -1), rand(2, 3, 5, seed=3), rand(2, 3, 5, seed=4).square() + 0.1
    history, tau = [t.float().to(DEVICE) for t in history], torch.tensor([0.4, 0.6], device=DEVICE)
    found, expected = (mixture_inference(x, *history, tau, backend=b) for b in ("triton", "reference"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("init", [False, True], ids=["seeded", "from a mixture"])
def test_fit_mixture_takes_a_backend(init):
    x = (rand(2, 90, 3) + 5 * torch.arange(90).remainder(3).unsqueeze(-1)).float().to(DEVICE)
    means = torch.tensor([0.0, 5.0, 10.0], device=DEVICE).view(1, 3, 1).expand(2, 3, 3) + 1
    start = gmm.GaussianMixture(torch.full((2, 3), 1 / 3, device=DEVICE), means, torch.ones_like(means)) if init else None
    found, expected = (
        gmm.fit_mixture(x, 3, em_iters=4, init=start, generator=torch.Generator(DEVICE).manual_seed(0), backend=b)
        for b in ("triton", "reference")
    )
    torch.testing.assert_close(vars(found), vars(expected), atol=1e-4, rtol=1e-4)


def test_lazily_negated_numbers_keep_their_sign():
    """The imaginary part of a conjugate is negated when PyTorch reads it; a kernel reads the memory as it is."""
    x, resp, upstream = rand(40, 8).float(), torch.softmax(rand(40, 2, seed=1).float(), -1), rand(40, 8, seed=2).float()
    x, resp, upstream = (t.to(DEVICE) for t in (x, resp, upstream))
    negated, upstream = (torch.complex(t, t).conj().imag for t in (x, upstream))
    assert negated.is_neg()
    assert upstream.is_neg()
    with pytest.raises(RuntimeError, match="lazily negated"):
        mixture_normalize(negated, resp, backend="triton")
    torch.testing.assert_close(mixture_normalize(negated, resp), mixture_normalize(-x, resp), atol=1e-5, rtol=1e-5)

    def gradient(backend):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(mixture_normalize(leaf, resp, backend=backend), leaf, upstream)

    torch.testing.assert_close(gradient("triton"), gradient("reference"), atol=1e-5, rtol=1e-5)
