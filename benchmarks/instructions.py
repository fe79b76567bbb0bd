"""What the compiler makes of the Triton kernels for a Hopper GPU, counted in its machine code: no GPU is needed.

    PYTHONPATH=src python benchmarks/instructions.py [--channels 64 128 448] [--components 3] [--option activation=relu ...]

For each kernel of a training step and an evaluation, channels last: its tile, the registers of a thread, the bytes that do
not fit them, and of its longest inner loop the instructions for each element that a thread holds, and the barriers. That of
``_inference`` is one of the T mixtures.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mixnorm import MixtureNorm2d
from mixnorm.ops import triton as triton_kernels
from mixnorm.ops.triton import launch, tiles

TOOLS = Path(nvidia.__file__).parent / "bin"
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
KERNELS = ("_em_step", "_mix", "_gradient_sums", "_gradient", "_inference")
PROCESSORS = 132
ROW = "{:>14} {:>8} {:>9}  {:>15} {:>9} {:>7} {:>12} {:>8}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 128, 448])
    parser.add_argument("--components", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="of mixture norm, such as activation=relu")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)
    plans = {}
    launch._run = lambda plan, device, given, own, extra: plans.setdefault(plan.kernel.__name__, (plan, given, own, extra))
    triton_kernels.INTERPRETED = True  # tensors on a CPU are taken
    tiles.processors = lambda device: PROCESSORS
    print(ROW.format("kernel", "channels", "dtype", "tile", "registers", "spilled", "instructions", "barriers"))
    for channels in arguments.channels:
        for dtype in (torch.float32, torch.bfloat16):
            plans.clear()
            step_and_evaluation(channels, dtype, arguments.components, options)
            for name in KERNELS:
                plan, *tensors = plans[name]
                print(ROW.format(name, channels, str(dtype)[6:], *described(plan, *tensors)), flush=True)


def step_and_evaluation(channels, dtype, components, options):
    layer = MixtureNorm2d(channels, num_components=components, backend="triton", **options)
    x = torch.ones(64, channels, 8, 8, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y))
    with torch.no_grad():
        layer.eval()(x)


def described(plan, given, own, extra):
    compiled = compile_for_hopper(plan, given, own, extra)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        usage = run("cuobjdump", "-res-usage", file)
        code = instructions(run("nvdisasm", "-c", file))
    loop = longest_innermost(code)
    tile = [plan.constants[name] for name in "WRSV"]
    elements = tile[0] * tile[1] * tile[2] * tile[3] / (tiles.THREADS_PER_WARP * compiled.metadata.num_warps)
    registers, stack = (re.search(rf"{word}:(\d+)", usage)[1] for word in ("REG", "STACK"))
    barriers = sum(name.startswith("BAR") for name, _ in loop)
    return "×".join(map(str, tile)), registers, stack, f"{len(loop) / elements:.1f}", barriers


def compile_for_hopper(plan, given, own, extra):
    """As a launch would, with tensors that are aligned."""
    names, constants, signature, hints = plan.kernel.arg_names, dict(plan.constants), {}, {}
    for place, (name, value) in enumerate(zip(names, (*given, *own, *extra, *plan.numbers), strict=False)):
        if value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i64" if value >> 31 else "i32"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            hints[(place,)] = [["tt.divisibility", 16]]
    compiler_options = {name: constants.pop(name) for name in list(constants) if name not in names}
    signature = {name: signature.get(name, "constexpr") for name in names}
    source = ASTSource(plan.kernel, signature, {(names.index(name),): v for name, v in constants.items()}, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=compiler_options)


def run(tool, *arguments):
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def instructions(text):
    """(name, operands) in their order, and (None, label) where a jump may go to."""
    found = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            found.append((None, label[1]))
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)(.*)", line):
            found.append(code.groups())
    return found


def longest_innermost(code):
    """The longest stretch from a label to a jump back to it that has no other such stretch in it."""
    labels = {label: place for place, (name, label) in enumerate(code) if name is None}
    jumps = [(place, re.search(r"\.L_\w+", rest)) for place, (name, rest) in enumerate(code) if name and "BRA" in name]
    loops = [(labels[label[0]], place) for place, label in jumps if label and labels[label[0]] < place]
    innermost = [one for one in loops if not any(one[0] <= other[0] and other[1] < one[1] for other in loops)]
    first, last = max(innermost, key=lambda loop: loop[1] - loop[0])
    return [(name, rest) for name, rest in code[first:last] if name is not None]


if __name__ == "__main__":
    main()
