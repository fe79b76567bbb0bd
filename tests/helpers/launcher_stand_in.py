"""A compiled kernel as Triton hands it out, with a function in place of the one in C that would start it on a GPU."""

from types import SimpleNamespace

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import compiler

STREAM = 77


def compiled_kernel(launch, *, scratch=0):
    """Triton's own objects, but for ``launch``, which gets what the function in C would."""
    launcher = object.__new__(CudaLauncher)
    launcher.launch = launch
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, True, False
    launcher.global_scratch_size, launcher.global_scratch_align = scratch, 16
    launcher.profile_scratch_size, launcher.profile_scratch_align = 0, 16
    kernel = object.__new__(compiler.CompiledKernel)
    kernel._run, kernel.module, kernel.function, kernel.packed_metadata = launcher, object(), 123, (4, 1, 512)
    kernel.name, kernel.src = "kernel", None
    return kernel


def pretend_a_gpu(set_attribute):
    """Gives Triton and PyTorch a current device and stream; ``set_attribute`` is as monkeypatch.setattr."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)
    set_attribute(compiler, "driver", SimpleNamespace(active=active))
    set_attribute(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def is_known():
    from mixnorm.ops.triton import launch

    return triton.__version__.startswith(launch.KNOWN_VERSIONS)
