import dataclasses
import json
import math

import numpy as np
import pytest

from mixnorm_lab.config import catalog
from mixnorm_lab.config.parts.gan import Gan
from mixnorm_lab.config.parts.mixture import Mixture
from mixnorm_lab.config.parts.optimizer import Optimizer, Schedule
from mixnorm_lab.config.run_config import RunConfig


def config(**changes):
    values = {
        "name": "run",
        "model": "cifar-cnn",
        "data": "cifar10",
        "epochs": 100,
        "batch_size": 256,
        "optimizer": Optimizer("rmsprop", lr=0.01, weight_decay=2e-5),
        "schedule": Schedule("step", factor=0.1, at=(0.5, 0.75)),
        "mixture": Mixture(("conv3", "conv2"), {"num_components": 3, "momentum": None}),
    }
    return RunConfig(**{**values, **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"mixture": None, "augment": False, "precision": "bf16"}, {"schedule": Schedule("constant")}]
)
def test_round_trip_through_json_text(changes):
    ours = config(**changes)
    again = RunConfig.from_json(json.loads(json.dumps(ours.to_json())))
    assert again == ours
    assert again.identity() == ours.identity()
    assert again.differences(ours) == []


def test_the_name_does_not_count_and_everything_else_does():
    ours = config()
    assert config(name="other").identity() == ours.identity()
    others = [
        config(model="digits-cnn"),
        config(data="digits"),
        config(epochs=99),
        config(batch_size=128),
        config(optimizer=Optimizer("rmsprop", lr=0.01, weight_decay=1e-4)),
        config(schedule=Schedule("step", factor=0.1, at=(0.5,))),
        config(mixture=None),
        config(mixture=Mixture(("conv3",), {"num_components": 3})),
        config(mixture=Mixture(("conv3", "conv2"), {"num_components": 4, "momentum": None})),
        config(seed=1),
        config(precision="bf16"),
        config(channels_last=True),
        config(augment=False),
        config(recalibrate=10),
        config(validation=0.1),
        config(norm_momentum=0.5),
        config(label_smoothing=0.1),
        config(optimizer=Optimizer("rmsprop", lr=0.01, weight_decay=2e-5, decayed="weights")),
        config(schedule=Schedule("one-cycle")),
        config(schedule=Schedule("one-cycle", warmup=0.2)),
    ]
    identities = {other.identity() for other in others}
    assert len(identities) == len(others)
    assert ours.identity() not in identities
    assert all(ours.differences(other) for other in others)


def test_whole_numbers_equal_their_floats():
    one, other = (config(optimizer=Optimizer("adam", lr=lr)) for lr in (1, 1.0))
    assert one.identity() == other.identity()
    assert one.differences(other) == []


def test_differences_name_field_and_both_values():
    other = config(optimizer=Optimizer("rmsprop", lr=0.05, weight_decay=2e-5), mixture=None)
    found = config().differences(other)
    assert "optimizer.lr: 0.01, not 0.05" in found
    assert "mixture.options.num_components: 3, not none" in found
    assert all(line.startswith(("optimizer.lr", "mixture")) for line in found)


def test_what_came_later_changes_no_identity():
    """Of a run that was recorded before generators were."""
    old = catalog.get("cifar-cnn/cifar10/bn-2").config
    assert old.identity() == "45f32ea95223465d"
    assert "gan" not in old.to_json()
    assert not {"betas", "decayed"} & old.to_json()["optimizer"].keys()
    assert not {"warmup"} & old.to_json()["schedule"].keys()


def test_a_generators_settings_are_part_of_it():
    run = config(gan=Gan(samples=100), optimizer=Optimizer("adam", 0.1, betas=(0.0, 0.9)))
    again = RunConfig.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.identity() == run.identity() != config().identity()
    assert "gan.samples: 100, not 200" in run.differences(dataclasses.replace(run, gan=Gan(samples=200)))


def test_exponential_schedule():
    """The paper's: × 0.93 every second epoch."""
    schedule = Schedule("exponential", factor=0.93, every=2)
    rates = [schedule.rate(0.01, epoch, 100) for epoch in range(100)]
    assert rates[:5] == pytest.approx([0.01, 0.01, 0.0093, 0.0093, 0.01 * 0.93**2])
    assert rates[-1] == pytest.approx(0.01 * 0.93**49)


@pytest.mark.parametrize(("epochs", "drops"), [(200, (100, 150)), (10, (5, 8)), (2, (1,)), (40, (20, 30))])
def test_step_schedule_drops_at_shares_of_the_training(epochs, drops):
    schedule = Schedule("step", factor=0.1, at=(0.5, 0.75))
    rates = [schedule.rate(1.0, epoch, epochs) for epoch in range(epochs)]
    assert tuple(e for e in range(1, epochs) if rates[e] < rates[e - 1]) == drops
    assert rates[0] == 1.0


def test_step_schedule_is_not_one_epoch_late_by_rounding():
    assert Schedule("step", factor=0.5, at=(0.7,)).rate(1.0, 7, 10) == 0.5


def test_one_cycle_goes_up_in_a_line_and_down_in_a_line():
    """10 epochs of 10 steps: the corners are at steps 0, 30 and 100, and a step has the rate of its middle."""
    schedule = Schedule("one-cycle")
    rates = [rate for epoch in range(10) for rate in schedule.rates(0.2, epoch, 10, 10)]
    corners = [(0, 0.0), (30, 0.2), (100, 0.0)]
    assert rates == pytest.approx(list(np.interp(np.arange(100) + 0.5, *zip(*corners, strict=True))))
    assert schedule.rate(0.2, 3, 10) == pytest.approx((rates[34] + rates[35]) / 2)
    assert max(Schedule("one-cycle", warmup=0.1).rates(1.0, 0, 1, 100)[:10]) == pytest.approx(0.95)


def test_cosine_is_half_a_period_after_its_warm_up():
    plain = Schedule("cosine").rates(0.2, 0, 1, 40)
    assert plain == pytest.approx([0.1 * (1 + math.cos(math.pi * (step + 0.5) / 40)) for step in range(40)])
    rising = Schedule("cosine", warmup=0.2).rates(0.2, 0, 1, 50)
    assert rising[:10] == pytest.approx([0.2 * (step + 0.5) / 10 for step in range(10)])
    assert rising[10:] == pytest.approx(plain)


def test_other_schedules_keep_their_rate_for_an_epoch():
    assert Schedule("exponential", factor=0.5, every=1).rates(0.1, 2, 5, 3) == [0.025] * 3


def test_constant_schedule():
    assert {Schedule("constant").rate(0.3, epoch, 5) for epoch in range(5)} == {0.3}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Optimizer("lion", 0.1), "choose one of rmsprop, nesterov, adam, sgd, adamw"),
        (lambda: Optimizer("sgd", 0.1, decayed="norms"), "choose one of all, weights"),
        (lambda: Optimizer("adam", -1.0), "learning rate"),
        (lambda: Optimizer("adam", math.nan), "learning rate"),
        (lambda: Optimizer("adam", 0.1, weight_decay=-1), "weight decay"),
        (lambda: Schedule("linear"), "exponential, step, constant, one-cycle, cosine"),
        (lambda: Schedule("cosine", warmup=1.0), "warmup"),
        (lambda: Schedule("step", at=(50,)), "shares"),
        (lambda: Optimizer("adam", 0.1, betas=(0.5, 1.0)), "betas"),
        (lambda: Gan(features="vgg"), "cifar-features, inception-2015"),
        (lambda: Gan(samples=0), "samples"),
        (lambda: Gan(channels=12), "a multiple of 8"),
        (lambda: config(epochs=0), "epochs"),
        (lambda: config(batch_size=0), "batch size"),
        (lambda: config(precision="fp16"), "fp32, bf16"),
        (lambda: config(validation=1.0), "validation"),
        (lambda: config(gan=Gan(), train_eval=True), "trains a generator: leave --train-eval out"),
        (lambda: config(data="my_module:loaders", train_eval=True), "loaders of its own.*leave --train-eval out"),
        (lambda: config(label_smoothing=1.0), "label smoothing"),
        (lambda: config(gan=Gan(), label_smoothing=0.1), "no labels: leave --label-smoothing out"),
        (lambda: RunConfig.from_json({**config().to_json(), "speed": 1}), "unknown field 'speed'"),
        (lambda: RunConfig.from_json({"name": "run"}), "Optimizer"),
        (lambda: RunConfig.from_json({**config().to_json(), "optimizer": {"name": "adam"}}), "lr"),
        (lambda: RunConfig.from_json({**config().to_json(), "epochs": "ten"}), "does not fit"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
