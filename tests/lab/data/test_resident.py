"""A data set on its device: which images a batch has, how they are changed, and that the kernel makes the same."""

import itertools

import numpy as np
import pytest
import torch
from data_helpers import random_dataset

from mixnorm_lab.data import DataSet, Images, Resident, load

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernel runs under the interpreter, see conftest.py
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")


def epoch(data, seed, number):
    """All images and labels of an epoch."""
    data.start_epoch(seed, number)
    batches = [data.batch(torch.tensor(step, device=data.device)) for step in range(data.steps_per_epoch)]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def standardized(dataset, images):
    """(x/255 − mean)/std in fp64."""
    train = dataset.train.images.numpy() / 255
    mean, std = (f(train, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    return (images.numpy() / 255 - mean) / std


def crops(image, pad):
    """{(top, left, flip): crop} of one standardized image (C, H, W), by a loop over its pixels."""
    _, height, width = image.shape
    found = {}
    for top, left, flip in itertools.product(range(2 * pad + 1), range(2 * pad + 1), (False, True)):
        crop = np.zeros(image.shape)
        for y, x in itertools.product(range(height), range(width)):
            row, column = y + top - pad, (width - 1 - x if flip else x) + left - pad
            if 0 <= row < height and 0 <= column < width:
                crop[:, y, x] = image[:, row, column]
        found[top, left, flip] = crop
    return found


@pytest.mark.parametrize("use_kernel", [False, True], ids=["torch", "kernel"])
def test_batches_are_random_crops_and_flips(use_kernel):
    if use_kernel:
        pytest.importorskip("triton")
    dataset = random_dataset(train=23, shape=(3, 6, 5))
    data = Resident(dataset, 4, device=DEVICE, pad=1)
    data.use_kernel = use_kernel
    candidates = [crops(image, 1) for image in standardized(dataset, dataset.train.images)]
    seen = set()
    for number in range(3):
        images, labels = epoch(data, 7, number)
        assert len(labels) == 20
        assert len(set(labels.tolist())) == 20  # each image once, three of them not at all
        for image, label in zip(images.cpu().double().numpy(), labels.tolist(), strict=True):
            distances = {key: np.abs(crop - image).max() for key, crop in candidates[label].items()}
            nearest = min(distances, key=distances.get)
            assert distances[nearest] < 1e-5
            seen.add(nearest)
    assert len(seen) > 14  # of 18, in 60 images


def test_crops_and_flips_are_uniform():
    """On images of one bright pixel, which says by where it ends up how its image was cropped and whether it was flipped."""
    count = 9 * 9 * 2 * 25
    images = torch.zeros(count, 1, 12, 20, dtype=torch.uint8)
    images[:, :, 5, 4] = 255  # to rows 1 to 9, and to columns 0 to 8, or 11 to 19 if flipped
    dataset = DataSet("points", *[Images(images, torch.zeros(count).long())] * 2, num_classes=1, augment=True)
    batches, _ = epoch(Resident(dataset, 50, device="cpu"), 0, 0)
    places = torch.bincount(batches.flatten(1).argmax(1), minlength=12 * 20).view(12, 20)
    cells = torch.cat([places[1:10, :9], places[1:10, 11:]], 1)
    assert cells.sum() == count
    assert ((cells - 25.0).square() / 25).sum() < 221  # χ² with 161 degrees of freedom, p = 0.001


def test_an_epoch_is_a_function_of_seed_and_number():
    dataset = random_dataset(train=50)
    first, second = (Resident(dataset, 8, device="cpu") for _ in range(2))
    expected = epoch(first, 3, 5)
    assert not torch.equal(epoch(first, 3, 6)[1], expected[1])
    assert not torch.equal(epoch(first, 4, 5)[1], expected[1])
    list(second.train_batches(3, seed=3))
    torch.manual_seed(1)
    for found, wanted in zip(epoch(second, 3, 5), expected, strict=True):
        assert torch.equal(found, wanted)


def test_steps_begin_again():
    data = Resident(random_dataset(train=17), 4, device=DEVICE)
    for use_kernel in {False, data.use_kernel}:
        data.use_kernel = use_kernel
        for step in range(4):
            expected, found = (data.batch(torch.tensor(number, device=DEVICE)) for number in (step, 4 + step))
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_without_augmentation(dtype, channels_last):
    dataset = random_dataset(train=9, augment=False)
    data = Resident(dataset, 9, device="cpu", dtype=dtype, channels_last=channels_last)
    images, labels = epoch(data, 0, 0)
    assert sorted(labels.tolist()) == list(range(9))
    expected = torch.from_numpy(standardized(dataset, dataset.train.images[labels]))
    torch.testing.assert_close(images, expected.to(dtype))
    assert images.is_contiguous(memory_format=data.memory_format)
    augmented = Resident(dataset, 9, device="cpu", augment=True)
    assert not torch.equal(epoch(augmented, 0, 0)[0], images.float())


SHAPES = [(3, 6, 5), (1, 8, 8), (2, 1, 7), (3, 20, 19)]  # the last is more than a program's block


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_kernel_makes_the_same(shape, dtype, channels_last, poisoned):
    """To the bit, but for the interpreter, which cuts bf16 off where a GPU rounds."""
    pytest.importorskip("triton")
    tolerance = {"rtol": 2**-7 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0, "atol": 0}
    dataset = random_dataset(train=7, shape=shape)
    for augment, pad in ((True, 4), (True, 0), (False, 4)):
        options = {"dtype": dtype, "channels_last": channels_last, "augment": augment, "pad": pad}
        kernel, plain = (Resident(dataset, 3, device=device, **options) for device in (DEVICE, "cpu"))
        kernel.use_kernel = True
        for number in range(2):
            (found, labels), (expected, wanted) = (epoch(data, 1, number) for data in (kernel, plain))
            assert torch.equal(labels.cpu(), wanted)
            assert found.dtype == dtype
            torch.testing.assert_close(found.cpu(), expected, **tolerance)
        images, _ = kernel.batch(torch.tensor(0, device=DEVICE))
        assert images.is_contiguous(memory_format=kernel.memory_format)


@pytest.mark.parametrize("channels_last", [False, True])
def test_test_batches(channels_last):
    dataset = random_dataset(test=9)
    data = Resident(dataset, 4, device="cpu", channels_last=channels_last)
    batches = list(data.test_batches(4))
    assert [len(labels) for _, labels in batches] == [4, 4, 1]
    assert torch.equal(torch.cat([labels for _, labels in batches]), dataset.test.labels)
    images = torch.cat([images for images, _ in batches])
    torch.testing.assert_close(
        images.double(), torch.from_numpy(standardized(dataset, dataset.test.images)), atol=1e-5, rtol=0
    )
    assert all(images.is_contiguous(memory_format=data.memory_format) for images, _ in batches)
    batches[0][0].zero_()
    assert torch.equal(torch.cat([i for i, _ in data.test_batches(4)]), images)  # nobody else's copy


def test_train_batches_for_recalibration():
    dataset = random_dataset(train=10, augment=False)
    data = Resident(dataset, 4, device="cpu")
    data.start_epoch(0, 0)
    before = data.batch(torch.tensor(1))[0]
    batches = list(data.train_batches(5, seed=0))  # of two in an epoch
    assert [tuple(images.shape) for images in batches] == [(4, 3, 6, 5)] * 5
    assert torch.equal(data.batch(torch.tensor(1))[0], before)
    known = standardized(dataset, dataset.train.images)
    for pair in (batches[:2], batches[2:4]):
        which = [np.abs(known - image.double().numpy()).max((1, 2, 3)).argmin() for image in torch.cat(pair)]
        assert len(set(which)) == 8
        assert all(np.abs(known[w] - i.double().numpy()).max() < 1e-5 for w, i in zip(which, torch.cat(pair), strict=True))
    for again, batch in zip(data.train_batches(5, seed=0), batches, strict=True):
        assert torch.equal(again, batch)
    assert not torch.equal(next(data.train_batches(1, seed=1)), batches[0])
    assert list(data.train_batches(0, seed=0)) == []


def test_standardized_training_images_have_mean_0_and_deviation_1():
    data = Resident(load("digits"), 1, device="cpu")
    images, _ = epoch(data, 0, 0)
    assert images.shape == (1438, *data.shape)
    assert data.num_classes == 10
    assert abs(images.double().mean()) < 1e-6
    assert abs(images.double().std(correction=0) - 1) < 1e-6


def test_a_constant_channel_is_0():
    dataset = random_dataset()
    dataset.train.images[:, 1] = 200
    images, _ = epoch(Resident(dataset, 4, device="cpu"), 0, 0)
    assert (images[:, 1] == 0).all()
    assert images.isfinite().all()


@pytest.mark.parametrize("batch_size", [0, -1, 24])
def test_a_batch_size_that_makes_no_batch(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}.* 1 to 23"):
        Resident(random_dataset(train=23), batch_size, device="cpu")


@on_gpu
@pytest.mark.parametrize("use_kernel", [False, True], ids=["torch", "kernel"])
def test_a_graph_holds_a_batch_and_its_step(use_kernel):
    """Captured once with a counter that it increments; replayed for two epochs, nothing read back."""
    dataset = random_dataset(train=64, shape=(3, 32, 32))
    options = {"dtype": torch.bfloat16, "channels_last": True}
    data, plain = (Resident(dataset, 16, device=device, **options) for device in ("cuda", "cpu"))
    data.use_kernel = use_kernel
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    data.batch(step)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        data.batch(step)
        torch.cuda.set_sync_debug_mode("default")  # a capture synchronizes on its own
        with torch.cuda.graph(graph):
            images, labels = data.batch(step)
            step += 1
        torch.cuda.set_sync_debug_mode("error")
        found = []
        for number in range(2):
            data.start_epoch(0, number)
            step.zero_()
            for _ in range(data.steps_per_epoch):
                graph.replay()
                found.append((images.clone(), labels.clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number in range(2):
        expected, wanted = epoch(plain, 0, number)
        part = found[4 * number : 4 * number + 4]
        assert torch.equal(torch.cat([images for images, _ in part]).cpu(), expected)
        assert torch.equal(torch.cat([labels for _, labels in part]).cpu(), wanted)


def test_plain_training_images_are_the_same_each_time_and_evenly_spaced():
    digits = load("digits")
    source = Resident(digits, 64, device="cpu", augment=True)
    every = [torch.cat(parts) for parts in zip(*source.plain_train_batches(100, 10_000), strict=True)]
    assert torch.equal(every[1], digits.train.labels)
    values = digits.train.images.double()
    torch.testing.assert_close(every[0].double(), (values - values.mean()) / values.std(correction=0), rtol=1e-5, atol=1e-5)
    some = [torch.cat(parts) for parts in zip(*source.plain_train_batches(7, 20), strict=True)]
    chosen = [i * len(digits.train) // 20 for i in range(20)]
    assert torch.equal(some[0], every[0][chosen])
    shares = [Resident(digits, 64, device="cpu", share=(rank, 2)) for rank in (0, 1)]
    labels = [label for share in shares for _, part in share.plain_train_batches(7, 20) for label in part.tolist()]
    assert labels == digits.train.labels[chosen].tolist()
