"""Where there is no GPU, the Triton kernels run under Triton's interpreter, which must be chosen before it is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    # The interpreter is numpy, which warns where a GPU gives an infinity or a NaN: log 0 of a component that is not in use.
    for category in ("RuntimeWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}:triton.runtime.interpreter")


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that was never written is NaN (or far out of range, for integers), so that it cannot pass for a result."""

    def fill(tensor):
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        allocate = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, allocate=allocate, **options: fill(allocate(*args, **options)))
