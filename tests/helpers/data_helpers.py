"""Tiny data sets in the official layout of CIFAR, as Python 2 wrote it and as Python 3 does."""

import pickle
import struct
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from mixnorm_lab.data import DataSet, Images, cifar, download

COUNTS = {"cifar10": (6, 5), "cifar100": (20, 10)}  # images in a training file and in a test file


def python2_pickle(record):
    """What Python 2 writes for a dict of strings, lists and arrays of bytes, opcode by opcode as in the official files."""
    memo = iter(range(1, 255))

    def put():
        return b"q" + bytes([next(memo)])

    def string(value):
        return b"U" + bytes([len(value)]) + value

    def item(value):
        if isinstance(value, np.ndarray):
            rows, columns = value.shape
            raw = value.tobytes()
            return (
                b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
                + b"K\x00\x85U\x01b\x87R" + put() + b"(K\x01" + struct.pack("<cHcH", b"M", rows, b"M", columns) + b"\x86"
                + b"cnumpy\ndtype\n" + put() + b"U\x02u1K\x00K\x01\x87R" + put()
                + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
            )  # fmt: skip
        if isinstance(value, list):
            return b"]" + put() + b"(" + b"".join(map(item, value)) + b"e"
        return b"K" + bytes([value]) if isinstance(value, int) else string(value) + put()

    pairs = b"".join(string(key) + put() + item(value) for key, value in record.items())
    return b"\x80\x02}" + put() + b"(" + pairs + b"u."


def python3_pickle(record):
    return pickle.dumps(record, protocol=2)


def official_record(name, count, seed):
    """A file's contents."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, cifar.OFFICIAL[name].num_classes, count).tolist()
    record = {b"batch_label": b"a batch", cifar.OFFICIAL[name].labels.encode(): labels}
    if name == "cifar100":
        record = {b"coarse_labels": [label // 5 for label in labels], **record, b"batch_label": b""}
    images = random.randint(0, 256, (count, 3072)).astype(np.uint8)
    return {**record, b"data": images, b"filenames": [f"{number}.png".encode() for number in range(count)]}


@pytest.fixture
def few(monkeypatch):
    """Official files are taken to have few images."""
    for name, (train, test) in COUNTS.items():
        official = cifar.OFFICIAL[name]
        few = replace(official, train=dict.fromkeys(official.train, train), test=dict.fromkeys(official.test, test))
        monkeypatch.setitem(cifar.OFFICIAL, name, few)


def write_official(name, folder, dump=python3_pickle):
    """Writes the official files into a folder; returns what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    records = {}
    for seed, (file, count) in enumerate(cifar.OFFICIAL[name].files.items()):
        records[file] = official_record(name, count, seed)
        (folder / file).write_bytes(dump(records[file]))
    return records


def write_archive(name, folder, monkeypatch, extra=()):
    """Writes an archive with the official files, and takes its checksum for the official one."""
    official = cifar.OFFICIAL[name]
    records = write_official(name, folder / "source" / official.folder)
    path = folder / download.ARCHIVES[name].file
    with tarfile.open(path, "w:gz") as tar:
        for member, file in extra:
            tar.addfile(member, file)
        tar.add(folder / "source" / official.folder, official.folder)
    set_checksum(name, path, monkeypatch)
    return path, records


def set_checksum(name, path, monkeypatch):
    monkeypatch.setitem(download.ARCHIVES, name, replace(download.ARCHIVES[name], md5=download.checksum(path)))


def random_dataset(train=23, test=9, shape=(3, 6, 5), augment=True):
    """Images whose label is their number, so that a batch says where each of its images comes from."""
    generator = torch.Generator().manual_seed(0)
    sets = [
        Images(torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8), torch.arange(count))
        for count in (train, test)
    ]
    return DataSet("random", *sets, num_classes=train, augment=augment)
