"""The history's queues: what comes in, what stays out, and what weight each of the last T batches has."""

import kernel_helpers as ops
import pytest
import torch
from triton_helpers import BF16, DEVICE, DTYPES, FORMATS, FP32, LAYOUTS, assert_as_accurate, make_points, rand

pytestmark = pytest.mark.usefixtures("poisoned")
# (B, T, K, D): one slot, more slots than a power of 2, more numbers than one program takes.
SHAPES = [(1, 1, 1, 1), (1, 10, 3, 7), (3, 4, 2, 5), (2, 3, 5, 1), (1, 5, 3, 130), (1, 17, 16, 20), (7, 2, 16, 3)]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
TOO_LARGE = 2e16  # for a mean


def make_queues(batch, slots, k, dim, *, dtype=FP32):
    shapes = ((batch, slots, k), (batch, slots, k, dim), (batch, slots, k, dim))
    queues = tuple(rand(*shape, seed=i).to(dtype).to(DEVICE) for i, shape in enumerate(shapes))
    return queues, torch.tensor(41, device=DEVICE)


def make_newest(batch, k, dim):
    shapes = ((batch, k), (batch, k, dim), (batch, k, dim))
    return tuple(rand(*shape, seed=9 + i).float().to(DEVICE) for i, shape in enumerate(shapes))


def pushed(queues, newest):
    """What the queues must be: by slots, the oldest gone and the newest last."""
    return [torch.cat([q[:, 1:], n.to(q.dtype).unsqueeze(1)], 1) for q, n in zip(queues, newest, strict=True)]


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_push(shape, dtype):
    batch, _, k, dim = shape
    (queues, tracked), newest = make_queues(*shape, dtype=dtype), make_newest(batch, k, dim)
    if DEVICE == "cpu":  # the interpreter cuts bf16 off where a GPU rounds: numbers that need neither
        newest = tuple(t.bfloat16().float() for t in newest)
    for step in range(1, 4):
        expected = pushed(queues, newest)
        ops.push(queues, newest, tracked, backend="triton")
        assert_equal(queues, expected)
        assert tracked == 41 + step
        newest = tuple(t * 2 for t in newest)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("dtype", "which", "value", "stays_out"),
    [
        (FP32, 1, TOO_LARGE, True), (FP32, 1, -TOO_LARGE, True), (FP32, 1, 9e15, False), (FP32, 2, TOO_LARGE, False),
        (torch.float16, 1, 7e4, True), (torch.float16, 2, 7e4, True), (torch.float16, 1, 6e4, False),
    ],
)  # fmt: skip
def test_what_squares_or_a_dtype_cannot_hold_stays_out(backend, dtype, which, value, stays_out):
    (queues, tracked), newest = make_queues(1, 3, 2, 5, dtype=dtype), make_newest(1, 2, 5)
    before = [q.clone() for q in queues]
    newest[which].view(-1)[3] = value
    ops.push(queues, newest, tracked, backend=backend)
    assert tracked == (41 if stays_out else 42)
    assert all(torch.equal(a, b) for a, b in zip(queues, before, strict=True)) == stays_out


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 4, 3, 7), (2, 3, 2, 130)], ids=str)
def test_what_is_not_finite_stays_out(shape, which, value):
    """One number anywhere keeps all of it out, whichever program sees it."""
    batch, _, k, dim = shape
    (queues, tracked), newest = make_queues(*shape), make_newest(batch, k, dim)
    before = [q.clone() for q in queues]
    for place in (0, -1):
        bad = [t.clone() for t in newest]
        bad[which].view(-1)[place] = value
        ops.push(queues, tuple(bad), tracked, backend="triton")
        assert_equal(queues, before)
        assert tracked == 41


def test_infinities_of_both_signs_do_not_cancel():
    (queues, tracked), newest = make_queues(1, 4, 2, 5), make_newest(1, 2, 5)
    before = [q.clone() for q in queues]
    newest[1][0, 0, 0], newest[2][0, 0, 0] = torch.inf, -torch.inf
    ops.push(queues, newest, tracked, backend="triton")
    assert_equal(queues, before)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize(
    ("batch", "k", "dim", "slots"), [(1, 3, 7, 4), (1, 2, 35, 10), (1, 1, 1, 1), (3, 2, 5, 4), (5, 3, 1, 17)]
)
def test_em_step_pushes_what_it_returns(batch, k, dim, slots, layout):
    x, mixture = make_points(batch, 3, 11, dim, k)
    queues, tracked = make_queues(batch, slots, k, dim)
    for step in range(1, 3):
        before = [q.clone() for q in queues]
        _, statistics = ops.em_step(LAYOUTS[layout](x), mixture, history=(queues, tracked), backend="triton")
        assert_equal(queues, pushed(before, statistics))
        assert tracked == 41 + step
        _, alone = ops.em_step(LAYOUTS[layout](x), mixture, backend="triton")
        assert_equal(statistics, alone)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(("batch", "k", "dim"), [(1, 3, 7), (1, 2, 35), (3, 2, 5)])
def test_em_step_keeps_out_what_is_not_finite(batch, k, dim, value):
    x, mixture = make_points(batch, 3, 11, dim, k)
    queues, tracked = make_queues(batch, 4, k, dim)
    before = [q.clone() for q in queues]
    for place in ((0, 0, 0, 0), (batch - 1, 2, 10, dim - 1)):
        bad = x.clone()
        bad[place] = value
        ops.em_step(bad, mixture, history=(queues, tracked), backend="triton")
        assert_equal(queues, before)
        assert tracked == 41


@pytest.mark.parametrize("value", [1.2e19, 1.5e19, 1.8e19, 3e19])
def test_a_sum_that_overflows_is_pushed_as_a_whole_or_not_at_all(value):
    """Points whose squares are just finite, in one of the channels: the statistics of the others are finite."""
    x, mixture = make_points(1, 3, 11, 35, 2)
    x[0, 0, :4, 0] = value
    queues, tracked = make_queues(1, 4, 2, 35)
    before = [q.clone() for q in queues]
    _, statistics = ops.em_step(x, mixture, history=(queues, tracked), backend="triton")
    finite = all(t.isfinite().all() for t in statistics)
    assert_equal(queues, pushed(before, statistics) if finite else before)
    assert tracked == (42 if finite else 41)


def test_em_step_pushes_to_queues_of_half_precision():
    x, mixture = make_points(1, 3, 11, 7, 2)
    queues, tracked = make_queues(1, 4, 2, 7, dtype=BF16)
    before = [q.clone() for q in queues]
    _, statistics = ops.em_step(x, mixture, history=(queues, tracked), backend="triton")
    assert_equal([q[:, :-1] for q in queues], [q[:, 1:] for q in before])
    for queue, value in zip(queues, statistics, strict=True):
        torch.testing.assert_close(queue[:, -1].float(), value, rtol=2**-7, atol=0)


HISTORIES = {
    "full": lambda w: w,
    "partly filled": lambda w: w * (torch.arange(w.shape[1], device=w.device) >= w.shape[1] // 2).view(1, -1, 1),
    "one batch": lambda w: w * (torch.arange(w.shape[1], device=w.device) == w.shape[1] - 1).view(1, -1, 1),
    "empty": lambda w: w * 0,
    "with a dropped component": lambda w: w * (torch.arange(w.shape[2], device=w.device) != w.shape[2] - 1),
    "empty beside full": lambda w: w * (torch.arange(w.shape[0], device=w.device) > 0).view(-1, 1, 1),
}


# Momentum 0.1, 1, 0 and None are a decay of 0.9, 0, 1 and 1.
@pytest.mark.parametrize("decay", [0.9, 0.0, 1.0, 0.5])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 10, 3), (3, 17, 5), (2, 4, 16)], ids=str)
def test_slot_weights(shape, history, decay):
    weights = HISTORIES[history](torch.softmax(rand(*shape), -1).float().to(DEVICE))
    if history == "with a dropped component":
        weights = weights / weights.sum(-1, keepdim=True)
    found, plain, exact = (
        dict(zip(("weights", "tau"), ops.slot_weights(w, decay, backend=b), strict=True))
        for w, b in ((weights, "triton"), (weights, "reference"), (weights.double(), "reference"))
    )
    assert torch.equal(found["weights"], plain["weights"])
    assert torch.equal(found["tau"] > 0, plain["tau"] > 0)
    assert_as_accurate(found, plain, exact)


@pytest.mark.parametrize("decay", [0, 1])
def test_a_decay_that_is_a_whole_number(decay):
    """As momentum=1 and momentum=0 give it."""
    weights = torch.softmax(rand(2, 10, 3), -1).float().to(DEVICE)
    for same in (decay, float(decay), decay):  # in either order: what is kept of the first call must not spoil the second
        for found, expected in zip(
            *(ops.slot_weights(weights, same, backend=b) for b in ("triton", "reference")), strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batch", [1, 5])
def test_slot_weights_of_any_number_of_mixtures(batch):
    weights = torch.softmax(rand(batch, 4, 3), -1).float().to(DEVICE)
    for found, expected in zip(*(ops.slot_weights(weights, 0.9, backend=b) for b in ("triton", "reference")), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_slot_weights_of_half_precision(dtype):
    weights = torch.softmax(rand(1, 10, 3), -1).to(dtype).to(DEVICE)
    (found, tau), (expected, of_all) = (ops.slot_weights(weights, 0.9, backend=b) for b in ("triton", "reference"))
    assert torch.equal(found, expected)
    assert tau.dtype == of_all.dtype
    # No worse than the reference, which computes in half precision.
    exact = ops.slot_weights(weights.double(), 0.9, backend="reference")[1]
    assert (tau - exact).abs().max() <= 2 * (of_all - exact).abs().max() + torch.finfo(dtype).eps * exact.max()


@pytest.mark.parametrize("batches", [0.5, 1.015, 1.03, 10.0, 32768.0])
def test_slot_weights_of_a_slot_that_stands_for_other_than_one_batch(batches):
    weights = torch.full((2, 4, 3), 1 / 3, device=DEVICE)
    weights[:, 1] *= batches
    for found, expected in zip(*(ops.slot_weights(weights, 0.9, backend=b) for b in ("triton", "reference")), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
