"""The queues of benchmarks/queues.py: each run can be built, has a folder of its own, and is not trained twice."""

import sys
from pathlib import Path

import pytest

from mixnorm_lab.data import NAMES
from mixnorm_lab.storage import records
from mixnorm_lab.training import build

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import queues  # noqa: E402

ALL = {f"{name}-{number}": queue for name, found in queues.QUEUES.items() for number, queue in enumerate(found)}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("queue", ALL.values(), ids=ALL)
def test_every_run_of_a_queue_has_a_folder_of_its_own(queue):
    runs = {queues.told(config): (config.name, config.seed) for config in queue.configs()}
    assert len(set(runs.values())) == len(runs)
    assert all(config.data in NAMES for config in queue.configs())


@pytest.mark.parametrize("queue", ALL.values(), ids=ALL)
def test_every_norm_of_a_queue_can_be_built(queue):
    for config in queue.configs():
        if config.seed == 0 and "inception" not in config.model:  # which takes seconds
            model = build.make_model(config, 100, (3, 32, 32))
            assert any(parameter.requires_grad for parameter in model.parameters())


def test_a_run_with_a_finished_record_is_not_to_do():
    queue = queues.QUEUES["resnet-18-held-out"][0]
    done = {queues.told(record.config) for record in records.find(Path(queue.results)) if record.finished}
    to_do = {queues.told(config) for config in queues.to_do(queue)}
    assert done
    assert to_do
    assert not done & to_do
    assert {queues.told(config) for config in queue.configs()} <= done | to_do


def test_a_row_that_is_changed_is_called_after_the_change():
    (config,) = queues.Rows(
        ("cifar-cnn/cifar100/mn-2",), range(1), options={"max_samples": None}, settings={"batch_size": 32}
    ).configs()
    assert config.name == "cifar-cnn/cifar100/mn-2,max_samples=None,batch_size=32"
    assert config.batch_size == 32
    assert config.mixture.options["max_samples"] is None
    assert config.mixture.options["num_components"] == 3


def test_runs_of_one_folder_are_trained_together():
    rows = queues.QUEUES["cifar-cnn-rows"]
    together = queues.by_place(rows)
    assert list(together) == [Path(".")]
    assert together[Path(".")] == [config for queue in rows for config in queues.to_do(queue)]
