"""The one parallel loop, which calls any compiled function by its address."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

from numba import njit

from mixnorm.ops.numba import em, evaluation, fit, gradient, threads, transform
from mixnorm.ops.numba.threads import parallel_for, stretch, stretches_of


@njit(nogil=True)
def _fill(item, x, factor, shift, y):
    _, _, start, stop = stretch(item, 3, x.shape[0])
    for i in range(start, stop):
        y[i] = x[i] * factor
        if shift is not None:
            y[i] += shift[i]


@njit(nogil=True)
def _fill_all(x, factor, shift, y):
    parallel_for(3, _fill, (x, factor, shift, y))


@njit(nogil=True)
def _fail(item, y):
    y[item] = 1
    if item == 1:
        raise ValueError


@njit(nogil=True)
def _fail_in_one(y):
    parallel_for(3, _fail, (y,))


@pytest.mark.parametrize("shifted", [False, True])
def test_every_item_gets_the_arguments(shifted):
    x, y = np.arange(10, dtype=np.float32), np.full(10, np.nan, np.float32)
    shift = np.ones(10, np.float32) if shifted else None
    _fill_all(x, np.float32(3), shift, y)
    np.testing.assert_array_equal(y, 3 * x + shifted)


def test_an_item_that_fails_is_an_error_after_all_others():
    y = np.zeros(3)
    with pytest.raises(MemoryError):
        _fail_in_one(y)
    np.testing.assert_array_equal(y, 1)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_stretches_hold_every_point_once(count):
    stretches = stretches_of.py_func(4, 2, count)  # Python cannot call what others alone call
    found = [stretch.py_func(item, stretches, count) for item in range(2 * stretches)]
    for mixture in range(2):
        points_of = [point for b, _, start, stop in found if b == mixture for point in range(start, stop)]
        assert points_of == list(range(count))


def test_a_change_in_any_file_of_the_folder_is_a_change_of_all_loops():
    """What numba keeps on disk is thrown away when the stamp is another; its own is that of a function's file alone."""
    entries = [em.em, fit.seed, transform.mix, gradient.gradient_points, evaluation.evaluate]
    assert {entry._cache._cache_file._source_stamp for entry in entries} == {threads._sources()}
    assert len(threads._sources()) == len(list(Path(threads.__file__).parent.glob("*.py")))
