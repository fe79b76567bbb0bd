"""A kernel is started directly where Triton's launcher is known, with what Triton itself would give it."""

import pytest

pytest.importorskip("triton", reason="triton is not installed, so that there are no kernels to launch")

import torch
import triton
from launcher_stand_in import compiled_kernel, is_known, pretend_a_gpu

from mixnorm.ops.triton import launch

known = pytest.mark.skipif(not is_known(), reason="this Triton launches in its own way")
GRID, ARGUMENTS = (5, 3, 1), (torch.zeros(2), None, 7, 0.5, True)
METADATA, HOOKS = 10, (11, 12)  # the places of what only a profiler reads


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    pretend_a_gpu(monkeypatch.setattr)


@known
def test_the_same_arguments_as_through_triton():
    seen = []
    kernel = compiled_kernel(lambda *arguments: seen.append(arguments))
    kernel[GRID](*ARGUMENTS)
    launch._starter(kernel, GRID, 0)(*ARGUMENTS)
    through_triton, direct = seen
    assert len(direct) == len(through_triton)
    for place, (ours, theirs) in enumerate(zip(direct, through_triton, strict=True)):
        if place in (METADATA, *HOOKS):
            assert ours is None
        else:
            assert ours is theirs or ours == theirs, place
    assert direct[:3] == GRID


@known
def test_a_profiler_is_told():
    seen, told = [], []
    kernel = compiled_kernel(lambda *arguments: seen.append(arguments))
    start = launch._starter(kernel, GRID, 0)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(told.append)
    try:
        start(*ARGUMENTS)
        assert seen[0][HOOKS[0]] is hooks
        assert seen[0][METADATA] is not None
    finally:
        hooks.remove(told.append)
    start(*ARGUMENTS)
    assert seen[1][HOOKS[0]] is None


@known
def test_a_hook_in_place_of_the_chain_is_told(monkeypatch):
    seen = []
    start = launch._starter(compiled_kernel(lambda *arguments: seen.append(arguments)), GRID, 0)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    start(*ARGUMENTS)
    assert seen[0][HOOKS[0]] is print


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "4.0.0"])
def test_another_triton_launches_in_its_own_way(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    start = launch._starter(compiled_kernel(lambda *arguments: None), GRID, 0)
    assert "CompiledKernel" in start.__qualname__


def test_a_kernel_with_memory_of_its_own_is_left_to_triton():
    start = launch._starter(compiled_kernel(lambda *arguments: None, scratch=64), GRID, 0)
    assert "CompiledKernel" in start.__qualname__


def test_each_device_has_its_own_compiled_kernel():
    x = torch.zeros(4)
    assert launch.key_of(0, (x,), ()) != launch.key_of(1, (x,), ())
    assert launch.key_of(0, (x,), ()) == launch.key_of(0, (torch.zeros(8),), ())
    assert launch.key_of(0, (x,), (1,)) != launch.key_of(0, (x,), (2**40,))
