"""A field is stated once: its option, its row in a report and its place in JSON follow from that."""

from dataclasses import dataclass, field, replace

import pytest

from mixnorm_lab.config import catalog, fields
from mixnorm_lab.config.fields import Option, setting
from mixnorm_lab.config.presets import DIGITS
from mixnorm_lab.config.run_config import OPTIONS, RunConfig


@dataclass(frozen=True)
class Clipped(RunConfig):
    """A run with one more field."""

    clip: float | None = field(
        default=None, metadata=setting(Option("--clip", "The largest gradient."), label="clipped at", later=True)
    )


def clipped(**changes):
    return Clipped(**{**vars(DIGITS), **changes})


def test_a_new_field_is_an_option_of_every_run():
    [*others, option] = fields.options(Clipped)
    assert others == list(OPTIONS.values())
    assert (option.name, option.flag, option.path, option.kind) == ("clip", "--clip", ("clip",), float)
    assert (option.shared, option.default) == (True, None)
    assert fields.with_value(clipped(), option, 0.5) == clipped(clip=0.5)
    assert option.on_command_line(0.5) == "--clip 0.5"


def test_a_new_field_is_a_row_where_it_has_a_value_and_older_runs_keep_their_identity():
    assert fields.rows(clipped()) == fields.rows(DIGITS)
    assert fields.rows(clipped(clip=0.5)) == fields.rows(DIGITS) | {"clipped at": "0.5"}
    assert clipped().to_json() == DIGITS.to_json()
    assert clipped().identity() == DIGITS.identity() != clipped(clip=0.5).identity()
    assert Clipped.from_json(clipped(clip=0.5).to_json()) == clipped(clip=0.5)


def test_the_order_of_options_and_of_rows():
    assert list(OPTIONS) == [
        "model", "layers", "components", "em_iters", "option", "epochs", "batch_size", "optimizer", "lr", "weight_decay",
        "momentum", "decayed", "schedule", "warmup", "recalibrate", "precision", "validation", "norm_momentum", "average",
        "compile", "label_smoothing", "train_eval", "image_size", "target", "subset",
    ]  # fmt: skip
    generator = replace(catalog.get("dcgan/cifar10/mn").config, norm_momentum=0.5)
    assert list(fields.rows(generator)) == [
        "model", "data", "epochs", "batch size", "optimizer", "learning rate", "weight decay", "schedule", "precision",
        "evaluated", "compiled", "memory format", "crops and flips", "refilled from", "norm", "momentum of the norms",
        "updates an epoch", "distance", "measured", "networks", "layers", "num_components", "em_iters", "activation",
    ]  # fmt: skip


def test_what_rows_say():
    told = fields.rows(replace(DIGITS, validation=0.1, average=0.9, recalibrate=4, augment=False, batch_size=8))
    assert told["data"] == "digits, 10% held out to test on"
    assert told["evaluated"] == "weights averaged with a decay of 0.9"
    assert (told["refilled from"], told["crops and flips"], told["batch size"]) == ("4 batches", "no", "8")
    assert (told["optimizer"], told["weight decay"]) == ("rmsprop, smoothing 0.9", "2e-05")
    assert (told["schedule"], told["norm"], told["layers"]) == ("× 0.93 every epoch", "mixture norm", "conv2")
    assert "label smoothing" not in told
    recipe = {"label_smoothing": 0.1, "schedule": "one-cycle", "decayed": "weights", "optimizer": "sgd"}
    told = fields.rows(DIGITS.with_options(recipe))
    assert (told["label smoothing"], told["optimizer"]) == ("0.1", "sgd, momentum 0.9")
    assert told["weight decay"] == "2e-05, without norms and biases"
    assert told["schedule"] == "one cycle: up in 30% of the steps, then linearly down to 0"
    assert fields.rows(DIGITS.with_options({"schedule": "cosine"}))["schedule"] == "cosine: then down to 0"
    step = fields.rows(catalog.get("densenet-40/cifar100/bn").config)
    assert (step["schedule"], step["norm"]) == ("× 0.1 at 50%, 75% of the training", "batch norm")
    assert fields.rows(replace(DIGITS, data="my_module:loaders"))["batch size"] == "that of the loaders"


def test_options_change_parts_and_entries():
    given = {"layers": "conv1, conv3", "components": 5, "option": ["inference=mixture", "momentum=none"], "lr": 0.5}
    changed = DIGITS.with_options(given)
    assert changed.mixture.layers == ("conv1", "conv3")
    wanted = {"num_components": 5, "em_iters": 2, "activation": "relu", "inference": "mixture", "momentum": None}
    assert changed.mixture.options == wanted
    assert changed.optimizer == replace(DIGITS.optimizer, lr=0.5)
    assert DIGITS.mixture.options["num_components"] == 3
    with pytest.raises(ValueError, match="--precision fp16 is unknown: choose from fp32, bf16"):
        DIGITS.with_options({"precision": "fp16"})
