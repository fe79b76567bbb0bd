"""Data sets: what is read from official files, archives and scikit-learn, and what bad files give."""

import io
import os
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_helpers import COUNTS, few, python2_pickle, python3_pickle, set_checksum, write_archive, write_official

from mixnorm_lab import data
from mixnorm_lab.data import cifar, dataset, download

__all__ = ["few"]  # a fixture
NAMES = ("cifar10", "cifar100")
pytestmark = pytest.mark.usefixtures("few")


def check(found, name, records):
    official = cifar.OFFICIAL[name]
    for images, files in ((found.train, official.train), (found.test, official.test)):
        rows = [row for file in files for row in records[file][b"data"]]
        labels = [label for file in files for label in records[file][official.labels.encode()]]
        assert images.labels.tolist() == labels
        assert images.labels.dtype == torch.int64
        assert images.images.dtype == torch.uint8
        assert np.array_equal(images.images.numpy(), np.reshape(rows, (-1, 3, 32, 32)))
    assert (found.name, found.num_classes, found.augment) == (name, official.num_classes, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
@pytest.mark.parametrize("inside", [True, False], ids=["own folder", "parent folder"])
def test_official_files(name, dump, inside, tmp_path):
    folder = tmp_path / cifar.OFFICIAL[name].folder
    records = write_official(name, folder, dump)
    check(data.load(name, folder if inside else tmp_path), name, records)


@pytest.mark.parametrize("name", NAMES)
def test_archive(name, tmp_path, monkeypatch):
    archive, records = write_archive(name, tmp_path, monkeypatch)
    check(data.load(name, tmp_path), name, records)
    archive.unlink()
    check(data.load(name, tmp_path), name, records)  # the files are there now


def test_archive_replaces_a_half_unpacked_folder(tmp_path, monkeypatch):
    _, records = write_archive("cifar10", tmp_path, monkeypatch)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"half")
    check(data.load("cifar10", tmp_path), "cifar10", records)
    assert {path.name for path in folder.iterdir()} == set(cifar.OFFICIAL["cifar10"].files)


def test_members_of_an_archive_write_nowhere_else(tmp_path, monkeypatch):
    def member(name, **values):
        info = tarfile.TarInfo(name)
        info.size = len(b"evil") if "type" not in values else 0
        for key, value in values.items():
            setattr(info, key, value)
        return info, io.BytesIO(b"evil")

    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "folder"
    extra = [
        member("../outside/relative"),
        member(str(outside / "absolute")),
        member("cifar-10-batches-py/../../outside/through"),
        member("cifar-10-batches-py", type=tarfile.SYMTYPE, linkname=str(outside)),
        member("cifar-10-batches-py/test_batch", type=tarfile.SYMTYPE, linkname=str(outside / "link")),
        member("cifar-10-batches-py/unknown"),
    ]
    _, records = write_archive("cifar10", folder, monkeypatch, extra)
    check(data.load("cifar10", folder), "cifar10", records)
    assert list(outside.iterdir()) == []
    unpacked = folder / "cifar-10-batches-py"
    assert not unpacked.is_symlink()
    assert {path.name for path in unpacked.iterdir()} == set(cifar.OFFICIAL["cifar10"].files)


def sentence(raised):
    """An error's text: one sentence with what to do."""
    text = str(raised.value)
    assert "\n" not in text
    assert "mixnorm data cifar" in text
    assert "--data DIR" in text
    return text


def test_damaged_archive(tmp_path, monkeypatch):
    archive, _ = write_archive("cifar10", tmp_path, monkeypatch)
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut off") as raised:
        data.load("cifar10", tmp_path)
    assert str(archive) in sentence(raised)


def test_every_changed_byte_and_every_cut_of_an_archive_is_noticed(tmp_path, monkeypatch):
    archive, _ = write_archive("cifar10", tmp_path, monkeypatch)
    content, random = archive.read_bytes(), np.random.default_rng(0)
    for place in random.choice(len(content), 100, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        for damaged in (changed, content[:place]):
            archive.write_bytes(damaged)
            with pytest.raises(ValueError, match="damaged or cut off") as raised:
                data.load("cifar10", tmp_path)
            assert str(archive) in sentence(raised)
    assert not (tmp_path / cifar.OFFICIAL["cifar10"].folder).exists()  # nothing was unpacked


def test_archive_without_a_file(tmp_path, monkeypatch):
    archive, _ = write_archive("cifar10", tmp_path, monkeypatch)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "source" / "cifar-10-batches-py" / "test_batch", "cifar-10-batches-py/test_batch")
    set_checksum("cifar10", archive, monkeypatch)
    with pytest.raises(ValueError, match="data_batch_1") as raised:
        data.load("cifar10", tmp_path)
    assert str(archive) in sentence(raised)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_archive_in_a_folder_without_permission(tmp_path, monkeypatch):
    write_archive("cifar10", tmp_path, monkeypatch)
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="--data DIR"):
        data.load("cifar10", tmp_path)


def test_full_disk_while_unpacking(tmp_path, monkeypatch):
    write_archive("cifar10", tmp_path, monkeypatch)

    def full(source, file):
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cifar.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match=r"No space left on device.*--data DIR"):
        data.load("cifar10", tmp_path)
    assert list((tmp_path / "cifar-10-batches-py").iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_missing_folder_and_missing_file(name, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as raised:
            data.load(name, folder)
        assert str(folder) in sentence(raised)
    write_official(name, tmp_path)
    missing = tmp_path / list(cifar.OFFICIAL[name].files)[-1]
    missing.unlink()
    with pytest.raises(FileNotFoundError) as raised:
        data.load(name, tmp_path)
    assert str(missing) in sentence(raised)


def test_wrong_contents_name_the_file(tmp_path):
    records = write_official("cifar10", tmp_path)
    good = records["test_batch"]
    images = good[b"data"]
    wrong = [
        {**good, b"data": images[:-1]},
        {**good, b"data": images[:, :-1]},
        {**good, b"data": images.astype(np.int8)},
        {**good, b"data": [1, 2]},
        {**good, b"labels": good[b"labels"][:-1]},
        {**good, b"labels": [*good[b"labels"][:-1], 10]},
        {**good, b"labels": [*good[b"labels"][:-1], -1]},
        {**good, b"labels": [*good[b"labels"][:-1], 0.5]},
        {b"data": images},
        {b"labels": good[b"labels"]},
        [1, 2],
    ]
    path = tmp_path / "test_batch"
    whole = path.read_bytes()
    for contents in [*map(python3_pickle, wrong), whole[: len(whole) // 2], whole[:-1], b"", b"no pickle"]:
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="damaged") as raised:
            data.load("cifar10", tmp_path)
        assert str(path) in sentence(raised)
    path.write_bytes(whole)
    check(data.load("cifar10", tmp_path), "cifar10", records)


def test_fine_labels_are_read(tmp_path):
    records = write_official("cifar100", tmp_path)
    assert max(records["train"][b"fine_labels"]) > 20  # more than there are coarse ones
    assert data.load("cifar100", tmp_path).train.labels.tolist() == records["train"][b"fine_labels"]


def test_without_a_folder_the_cache_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path))
    records = write_official("cifar10", tmp_path / "cifar-10-batches-py")
    check(data.load("cifar10"), "cifar10", records)


def test_unknown_names_get_the_nearest():
    with pytest.raises(ValueError, match="near cifar10") as raised:
        data.load("cifar-10")
    assert "digits" in str(raised.value)
    with pytest.raises(ValueError, match="digits, cifar10, cifar100"):
        data.load("imagenet")
    with pytest.raises(ValueError, match="leave --data out"):
        data.load("digits", "some/folder")


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    expected = load_digits()
    found = data.load("digits")
    assert found.train.images.shape[1:] == (1, 8, 8)
    assert (found.num_classes, found.augment) == (10, False)
    both = torch.cat([found.train.images, found.test.images])[:, 0]
    values = sorted(
        zip((both // 15).flatten(1).tolist(), [*found.train.labels.tolist(), *found.test.labels.tolist()], strict=True)
    )
    assert torch.equal(both // 15 * 15, both)
    assert values == sorted(zip(expected.images.reshape(-1, 64).tolist(), expected.target.tolist(), strict=True))
    shares = torch.bincount(found.test.labels) / torch.bincount(torch.cat([found.train.labels, found.test.labels]))
    assert (shares - 0.2).abs().max() < 0.005
    assert torch.equal(data.load("digits").test.images, found.test.images)


def test_validation_split():
    whole = data.load("digits")
    split = data.validation_split(whole, fraction=0.25, seed=3)
    assert len(split.train) + len(split.test) == len(whole.train)
    assert replace(split, train=whole.train, test=whole.test) == whole
    rows = {tuple(row) for row in whole.test.images.flatten(1).tolist()}
    assert not rows & {tuple(row) for row in split.test.images.flatten(1).tolist()}
    both = [row for part in (split.train, split.test) for row in part.images.flatten(1).tolist()]
    assert sorted(both) == sorted(whole.train.images.flatten(1).tolist())
    held, old = (torch.bincount(labels) for labels in (split.test.labels, whole.train.labels))
    assert ((held - 0.25 * old).abs() <= 0.5).all()
    again, other = (data.validation_split(whole, 0.25, seed) for seed in (3, 4))
    assert torch.equal(again.test.images, split.test.images)
    assert not torch.equal(other.test.images, split.test.images)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0, 1e-9])
def test_validation_split_needs_a_share(fraction):
    with pytest.raises(ValueError, match="between 0 and 1"):
        data.validation_split(data.load("digits"), fraction)


def test_channel_statistics_and_description(tmp_path):
    write_official("cifar10", tmp_path)
    found = data.load("cifar10", tmp_path)
    means, deviations = dataset.channel_statistics(found.train.images)
    numbers = found.train.images.double()
    torch.testing.assert_close(means, numbers.mean((0, 2, 3)))
    torch.testing.assert_close(deviations, numbers.std((0, 2, 3), correction=0))
    rows = dict(data.describe(found))
    assert rows["training images"] == str(5 * COUNTS["cifar10"][0])
    assert rows["channel means"] == " ".join(f"{mean:.4f}" for mean in (numbers / 255).mean((0, 2, 3)).tolist())
    assert all(isinstance(value, str) for value in rows.values())


def test_official_constants(monkeypatch):
    monkeypatch.undo()  # without few images
    assert set(download.ARCHIVES) == set(cifar.OFFICIAL) == {*data.NAMES} - {"digits"}
    for official in cifar.OFFICIAL.values():
        assert (sum(official.train.values()), sum(official.test.values())) == (50_000, 10_000)
