"""The Triton kernels compile for a GPU, also where there is none: the interpreter takes more than the compiler does."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed, so that there are no kernels to test")

# In a process of its own: in this one the kernels are the interpreter's. What would be launched is compiled instead.
SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import mixnorm.ops.triton
from mixnorm import MixtureNorm2d
from mixnorm.ops.triton import launch

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
compiled = set()

def compile(plan, device, given, own, extra):
    names, signature, constants = plan.kernel.arg_names, {}, dict(plan.constants)
    for name, value in zip(names, (*given, *own, *extra, *plan.numbers)):
        if value is None:
            constants[name] = None
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i64" if value >> 31 else "i32"
    options = {name: constants.pop(name) for name in list(constants) if name not in names}
    key = (plan.kernel.__name__, str(signature), str(constants))
    if key not in compiled:
        compiled.add(key)
        signature = {name: signature.get(name, "constexpr") for name in names}
        source = ASTSource(plan.kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

launch._run, mixnorm.ops.triton.INTERPRETED = compile, True
for options in [
    {},
    {"affine_mode": "statistics", "activation": "gelu"},
    {"within": "learned", "between": "learned"},
    {"scale": "unit", "within": 0.5, "activation": "relu"},
    {"deviation": "learned", "activation": "relu"},
    {"component_affine": True, "seeding": "warm", "between": 1.0, "scale": "unit"},
]:
    layer = MixtureNorm2d(6, backend="triton", **options)
    x = torch.ones(8, 6, 5, 5, dtype=torch.bfloat16 if options else torch.float32, requires_grad=True)
    for _ in range(2):
        layer.train()(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x)
print(*sorted({name for name, *_ in compiled}))
"""


def test_every_kernel_compiles_for_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    names = set(found.stdout.split())
    assert names >= {
        "_em_step",
        "_gradient",
        "_gradient_lines",
        "_gradient_sums",
        "_inference",
        "_m_step",
        "_mix",
        "_tables",
    }
