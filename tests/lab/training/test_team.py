"""Several processes that train one run together are as one process with the same batch."""

import dataclasses

import pytest
import team_helpers as helpers
import torch
from data_helpers import random_dataset
from run_helpers import config, lines, same
from team_helpers import CASES, FINISHED, INTERRUPTED, NOT_FINITE

from mixnorm_lab.config.parts.gan import Gan
from mixnorm_lab.data import Resident
from mixnorm_lab.launch import torchrun
from mixnorm_lab.storage import records
from mixnorm_lab.training.build import check_shared
from mixnorm_lab.training.not_finite import NotFinite
from mixnorm_lab.training.team import ALONE, Team


def assert_as_one(found, alone):
    """The weights to fp64's rounding, which RMSprop makes larger where a gradient is small; figures to that of fp32, in
    which they are noted."""
    for name, value in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=1e-8, rtol=0)
    assert len(found["rows"]) == len(alone["rows"]) == 2
    for row, expected in zip(found["rows"], alone["rows"], strict=True):
        for name in ("train_loss", "test_loss", "recalibrated_loss"):
            assert row[name] == pytest.approx(expected[name], abs=2e-6)
        for name in ("train_error", "test_error", "recalibrated_error", "learning_rate", "steps", "components"):
            assert row[name] == expected[name]


def test_two_ranks_train_as_one_process(tmp_path):
    helpers.interrupt_alone(tmp_path)
    first, second = helpers.launch(tmp_path)
    alone = {name: helpers.train_case(run, tmp_path / "alone" / name) for name, run in CASES.items()}
    for name in CASES:
        assert_as_one(first[name], alone[name])
        assert same(first[name]["weights"], second[name]["weights"])
        assert [row["test_loss"] for row in first[name]["rows"]] == [row["test_loss"] for row in second[name]["rows"]]
        assert records.read(tmp_path / name / records.NAME).finished
    # What one process began, two go on with.
    assert_as_one(first[INTERRUPTED], alone["mixture norm"])
    assert_as_one(second[INTERRUPTED], alone["mixture norm"])
    assert [line["epoch"] for line in lines(tmp_path / INTERRUPTED) if line["kind"] == "resume"] == [1]
    assert first[FINISHED] == second[FINISHED] == records.read(tmp_path / "mixture norm" / records.NAME).epochs
    # What is not finite on one rank ends both, and both know where it began.
    with pytest.raises(NotFinite) as caught:
        helpers.train_case(CASES["mixture norm"], tmp_path / "alone" / NOT_FINITE, source=helpers.WithInfinity)
    assert first[NOT_FINITE] == second[NOT_FINITE] == str(caught.value)
    assert "step 3 with the inputs" in first[NOT_FINITE]
    assert records.read(tmp_path / NOT_FINITE / records.NAME).reason == "not finite"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_shares_make_up_the_batches_and_the_test_images(ranks):
    dataset = random_dataset(train=40, test=11)
    shares = [(0, 1), *((rank, ranks) for rank in range(ranks))]
    whole, *parts = (Resident(dataset, 12, device="cpu", augment=True, share=share) for share in shares)
    for source in (whole, *parts):
        source.start_epoch(5, 1)
    for step in map(torch.tensor, range(3)):
        batches = [part.batch(step) for part in parts]
        for found, expected in zip(zip(*batches, strict=True), whole.batch(step), strict=True):
            assert torch.equal(torch.cat(found), expected)
    refills = zip(*(part.train_batches(4, seed=2) for part in parts), strict=True)
    for found, expected in zip(refills, whole.train_batches(4, seed=2), strict=True):
        assert torch.equal(torch.cat(found), expected)
    tests = [batch for part in parts for batch in part.test_batches(2)]
    for found, expected in zip(zip(*tests, strict=True), zip(*whole.test_batches(2), strict=True), strict=True):
        assert torch.equal(torch.cat(found), torch.cat(expected))


def test_a_batch_that_the_ranks_cannot_share():
    with pytest.raises(ValueError, match="batch_size=10 makes no 4 equal shares: use a multiple of 4"):
        Resident(random_dataset(train=40), 10, device="cpu", share=(1, 4))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": 65}, "a batch of 65 cannot be shared evenly by 2 processes: use a --batch-size or an"),
        ({"data": "my_module:loaders"}, "my_module:loaders is read in one process: leave torchrun out"),
        ({"gan": Gan()}, "test trains a generator, which runs in one process: leave torchrun out"),
    ],
)
def test_what_ranks_cannot_train(changes, sentence):
    run = dataclasses.replace(config(), **changes)
    check_shared(run, ALONE)
    with pytest.raises(ValueError, match=sentence):
        check_shared(run, Team(0, 2))


def test_each_process_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun.own_device(torch.device("cuda")) == torch.device("cuda:1")
    assert torchrun.own_device(torch.device("cpu")) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="more processes than GPUs here: start torchrun with --nproc-per-node 2"):
        torchrun.own_device(torch.device("cuda"))


def test_a_process_that_torchrun_did_not_start_is_alone():
    with torchrun.joined(torch.device("cpu")) as found:
        assert found == ALONE
    value = {"a": torch.ones(2)}
    assert found.from_first(value) is value
