"""Vectors in the loops for a CPU: every operation against NumPy's, also of what is not finite."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

from numba import njit

from mixnorm.ops.numba import lanes, points
from mixnorm.ops.numba.lanes import SQUARE, WIDTH

DTYPES = [np.float32, np.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30]


def numbers(seed, dtype):
    """A pair of lanes in which every special number meets some others."""
    draws = np.random.default_rng(seed).normal(0, 3, (2, WIDTH))
    draws[0, : len(SPECIAL)] = SPECIAL
    draws[1, : len(SPECIAL)] = SPECIAL[3:] + SPECIAL[:3]
    return draws.astype(dtype)


@njit
def _arithmetic(a, b, out):
    x, y = lanes.load(a, 0), lanes.load(b, 0)
    found = (x + y, x - y, x * y, x / y, 2.0 - x, y * 0.5)
    for n in range(len(found)):
        lanes.store(out, WIDTH * n, found[n])


@njit
def _choices(a, b, out):
    x, y = lanes.load(a, 0), lanes.load(b, 0)
    found = (lanes.larger(x, y), lanes.smaller(x, y), lanes.where(x, y, -1.0), lanes.larger(x, 0.0), lanes.wide(a[2]))
    for n in range(len(found)):
        lanes.store(out, WIDTH * n, found[n])


@njit
def _reduced(a):
    x = lanes.load(a, 0)
    return lanes.total(x), lanes.has_any(x)


@njit
def _exp(a, out):
    lanes.store(out, 0, lanes.exp(lanes.load(a, 0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_is_that_of_numpy(dtype):
    (a, b), out = numbers(0, dtype), np.empty(6 * WIDTH, dtype)
    _arithmetic(a, b, out)
    with np.errstate(all="ignore"):
        expected = np.concatenate([a + b, a - b, a * b, a / b, 2 - a, b * dtype(0.5)])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_keep_the_first_number_where_one_is_nan(dtype):
    (a, b), out = numbers(1, dtype), np.empty(5 * WIDTH, dtype)
    _choices(a, b, out)
    with np.errstate(invalid="ignore"):
        larger, smaller = np.where(b > a, b, a), np.where(b < a, b, a)
        expected = np.concatenate([larger, smaller, np.where(a > 0, b, -1), np.where(a < 0, 0, a), np.full(WIDTH, a[2])])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype):
    a = np.random.default_rng(2).normal(size=WIDTH).astype(dtype)
    found, has_any = _reduced(a)
    assert found == pytest.approx(a.astype(np.float64).sum(), rel=1e-5)
    assert has_any
    assert _reduced(np.zeros(WIDTH, dtype)) == (0, False)
    for place in (0, WIDTH - 1):
        for value in (1e-30, np.nan):
            a = np.zeros(WIDTH, dtype)
            a[place] = value
            assert _reduced(a)[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential_function_below_0(dtype):
    """To two roundings, and 0 where numbers of the type end; not of what is above 0, which no loop asks for."""
    least = {np.float32: -87.0, np.float64: -700.0}[dtype]
    z = np.concatenate([np.linspace(least, 0, 1000 * WIDTH), -np.logspace(-12, 0, WIDTH)]).astype(dtype)
    out = np.empty_like(z)
    for begin in range(0, len(z), WIDTH):
        _exp(z[begin : begin + WIDTH], out[begin : begin + WIDTH])
    expected = np.exp(z.astype(np.longdouble)).astype(dtype)
    np.testing.assert_array_max_ulp(out, expected, 2)
    ends = np.zeros(WIDTH, dtype)
    ends[:4] = 0, np.nextafter(dtype(least), dtype(-np.inf)), -np.inf, np.nan
    _exp(ends, out[:WIDTH])
    np.testing.assert_array_equal(out[:4], np.array([1, 0, 0, np.nan], dtype))


@njit
def _through_a_tile(x, y, stop, tile):
    places = np.empty(WIDTH, np.int64)
    count = points.load_tile(x, 0, 3, stop, places, tile, 0)
    points.store_tile(tile, count, y, 0, 3, places)
    return count


def as_points(array, outer_axis, inner_axis, dim_axis):
    steps = [array.strides[axis] // array.itemsize for axis in (outer_axis, inner_axis, dim_axis)]
    shape = [array.shape[axis] for axis in (outer_axis, inner_axis, dim_axis)]
    return points.Points(array.reshape(-1), 1, *shape, array.size, *steps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, SQUARE, 2 * SQUARE + 5])
@pytest.mark.parametrize("inner", [4, 7, 100])
@pytest.mark.parametrize("axes", [(0, 2, 1), (0, 1, 2), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("stop", [4, 5 + SQUARE, 3 + WIDTH, 200])
def test_a_tile_holds_the_points_of_any_layout_and_gives_them_back(dtype, dim, inner, axes, stop):
    """Channels one after the other, points one after the other, neither; whole tiles and the end of the points."""
    shape = [0, 0, 0]
    for axis, size in zip(axes, (-(-200 // inner), inner, dim), strict=True):
        shape[axis] = size
    array = np.random.default_rng(3).normal(size=shape).astype(dtype)
    result, tile = np.full_like(array, np.nan), np.full(WIDTH * dim, np.nan, dtype)
    count = _through_a_tile(as_points(array, *axes), as_points(result, *axes), stop, tile)
    assert count == min(WIDTH, stop - 3)
    rows, found = (a.transpose(axes).reshape(-1, dim) for a in (array, result))
    expected = rows[[min(3 + p, stop - 1) for p in range(WIDTH)]]
    np.testing.assert_array_equal(tile.reshape(dim, WIDTH), expected.T)
    np.testing.assert_array_equal(found[3 : 3 + count], rows[3 : 3 + count])
    assert np.isnan(np.delete(found, range(3, 3 + count), 0)).all()
