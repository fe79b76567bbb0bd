"""A user's loaders with samples held out, or with a few of them alone."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from mixnorm_lab.data import split_loaders, subset

DATA = TensorDataset(torch.arange(50))


def numbers(loader):
    return [number for (batch,) in loader for number in batch.tolist()]


def doubled(samples):
    return [2 * torch.stack([sample for (sample,) in samples])]


def test_held_out_samples_are_those_that_training_lacks():
    train, test = split_loaders.held_out(
        DataLoader(DATA, batch_size=8, shuffle=True, drop_last=True, collate_fn=doubled), 0.2
    )
    assert len(numbers(test)) == 10
    assert numbers(test) == sorted(numbers(test))
    assert len(train) == 5
    seen = set(numbers(train)) | set(numbers(train)) | set(numbers(test))
    assert seen == set(range(0, 100, 2))
    assert not set(numbers(train)) & set(numbers(test))
    assert numbers(train) != numbers(train)  # which goes on to shuffle
    again = split_loaders.held_out(DataLoader(DATA, batch_size=8, collate_fn=doubled), 0.2)
    assert numbers(again[1]) == numbers(test)
    assert numbers(again[0]) == sorted(numbers(again[0]))


@pytest.mark.parametrize(("wanted", "sizes"), [(20, (20, 20)), (0.5, (25, 6)), (40, (40, 12)), (1000, (50, 12))])
def test_a_subset_is_of_training_and_test_data(wanted, sizes):
    test = TensorDataset(torch.arange(20 if wanted == 20 else 12))
    sizes = sizes if wanted != 20 else (20, 20)
    parts = split_loaders.subset(DataLoader(DATA, batch_size=8, shuffle=True), DataLoader(test, batch_size=8), wanted)
    assert tuple(len(numbers(part)) for part in parts) == sizes


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([1, 2], "the data is an object of the type list, and no DataLoader"),
        (DataLoader(Stream()), "has no length and no single samples"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 50, 50)), "draws its samples with a WeightedRandomSampler"),
        (DataLoader(DATA, batch_sampler=[[1, 2]]), "draws its batches with a list of its own"),
    ],
)
def test_loaders_that_cannot_be_split(loader, why):
    with pytest.raises(ValueError, match=f"--validation cannot split your data .*{why}.*: split it in your function"):
        split_loaders.held_out(loader, 0.2)
    with pytest.raises(ValueError, match="--subset cannot split"):
        split_loaders.subset(DataLoader(DATA), loader, 5)


def test_a_share_that_leaves_one_side_empty():
    with pytest.raises(ValueError, match=r"--validation 0\.001 of 50 samples leaves one side empty"):
        split_loaders.held_out(DataLoader(DATA), 0.001)


@pytest.mark.parametrize(("wanted", "sizes"), [(100, (100, 100)), (0.1, (144, 36)), (1000, (1000, 359))])
def test_a_subset_of_a_named_data_set_has_its_classes(wanted, sizes):
    from mixnorm_lab import data

    digits = data.load("digits")
    part = subset(digits, wanted)
    for found, size in zip((part.train, part.test), sizes, strict=True):
        assert len(found) == pytest.approx(size, abs=5)
        assert len(found.labels.unique()) == 10
    assert torch.equal(part.train.images, subset(digits, wanted).train.images)
