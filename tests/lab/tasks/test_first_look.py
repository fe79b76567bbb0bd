"""A first look at a project: the inputs of any batch reach the model, and its norms have points for their components."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mixnorm import MixtureNorm2d
from mixnorm_lab.data import batches
from mixnorm_lab.tasks.first_look import Look, check_components, components_of, look, note_of_scale
from mixnorm_lab.tasks.forward import call, logits_of
from mixnorm_lab.tasks.task import Task

IMAGES, LABELS = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


class Named(Body):
    """As Hugging Face's models are: with a loss of their own where they are told the labels."""

    def forward(self, pixel_values, scale=None, labels=None):
        logits = self.body(pixel_values if scale is None else pixel_values * scale)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Plain(Body):
    def forward(self, x):
        return self.body(x)


class Two(Body):
    def forward(self, x, scale):
        return self.body(x * scale)


SCALE = torch.full((20, 1, 1, 1), 2.0)


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        (Plain, (IMAGES, LABELS)),
        (Plain, {"image": IMAGES, "label": LABELS}),
        (Plain, {"image": IMAGES, "file": ["a"] * 20, "label": LABELS}),
        (Two, ((IMAGES, SCALE), LABELS)),
        (Two, {"x": IMAGES, "scale": SCALE, "targets": LABELS}),
        (Named, {"pixel_values": IMAGES, "labels": LABELS, "index": LABELS}),
        (Named, {"pixel_values": IMAGES, "scale": SCALE, "labels": LABELS}),
    ],
)
def test_batches_of_many_kinds_reach_the_model(kind, batch):
    torch.manual_seed(0)
    model = kind().eval()
    inputs, labels = batches.split(batch)
    assert labels is LABELS
    scaled = IMAGES * (2 if "scale" in batch or kind is Two else 1)
    torch.testing.assert_close(logits_of(call(model, inputs, labels)), model.body(scaled))
    found = look(model, (inputs, labels))
    assert (found.kind, found.has_loss, found.unfit) == ("classes", kind is Named, "")
    assert found.points == {"body.1": 20 * 16}
    assert found.positions == {"body.1": 16}


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ((IMAGES, LABELS, LABELS), "a batch of the data is a tuple of Tensor, Tensor, Tensor: make each a pair .* --step"),
        ({"image": IMAGES, "class": LABELS}, "a dictionary of image, class: call its labels 'labels', or give --step"),
        ({"image": IMAGES, "labels": [1, 2]}, "the labels of a batch are a list of int, int, but must be a tensor"),
        (IMAGES, "a batch of the data is a Tensor: make each a pair"),
        ((IMAGES, LABELS[:3]), r"\(20, 1, 6, 6\) and \(3,\): there must be a label for each input"),
    ],
)
def test_batches_that_are_no_pairs(batch, sentence):
    with pytest.raises(ValueError, match=sentence):
        batches.split(batch)


def test_inputs_that_the_model_does_not_know():
    with pytest.raises(ValueError, match="the inputs left, right, but the model's forward takes x: give both the"):
        call(Plain(), {"left": IMAGES, "right": IMAGES})


def test_an_output_without_logits():
    with pytest.raises(ValueError, match=r"the model returns a tuple of 2: return a tensor, or an object with \.logits"):
        logits_of((IMAGES, IMAGES))
    assert logits_of({"out": IMAGES, "aux": LABELS}) is IMAGES


def test_nested_batches_are_moved_as_a_whole():
    batch = {"a": (IMAGES, [LABELS]), "b": "text", "c": SimpleNamespace(to=lambda device: f"on {device}")}
    moved = batches.placed(batch, torch.device("meta"), channels_last=True)
    assert moved["a"][0].is_meta
    assert moved["a"][0].is_contiguous(memory_format=torch.channels_last)
    assert moved["a"][1][0].is_meta
    assert (moved["b"], moved["c"]) == ("text", "on meta")
    assert batches.size(batch) == 20
    assert [len(part) for part in batches.few((IMAGES, LABELS), 5)] == [5, 5]


def test_labels_beyond_the_first_samples_are_looked_at_as_well():
    labels = torch.cat([torch.zeros(19, dtype=torch.long), torch.tensor([7])])
    assert "the labels hold 7, but the model has 3 outputs" in look(Plain(), (IMAGES, labels)).unfit


def test_a_step_of_the_users_gets_the_whole_batch():
    sizes = []

    def step(model, batch):
        sizes.append(len(batch["x"]))
        return model(batch["x"]).square().mean()

    found = look(Plain(), {"x": IMAGES}, step)
    assert (sizes, found.kind, found.points) == ([20], None, {"body.1": 320})


def test_a_step_returns_a_loss():
    for value, sentence in ((None, "returned nothing"), (torch.zeros(3), r"returned a tensor of the shape \(3,\)")):
        task = Task()
        task.step = lambda model, batch, value=value: value
        with pytest.raises(ValueError, match=f"--step must return the loss, a tensor of one number, but {sentence}"):
            task.train(Plain(), {"x": IMAGES}, torch.no_grad())


@pytest.mark.parametrize(
    ("components", "points", "population", "sentence"),
    [
        (
            50,
            128,
            "batch",
            "50 components are too many for 'norm', which gets 128 points .*: use -k 16 or less, larger",
        ),
        (2000, 4096, "channel", "2,000 components are too many .*: use -k 512 or less"),
        (5, 4096, "instance", "5 components are too many for 'norm', which gets 32 points .*: use -k 4 or less"),
    ],
)
def test_more_components_than_points_are_refused(components, points, population, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_components(Look({"norm": points}, {"norm": points // 128}), {"norm": (components, population)})


def test_few_points_and_many_components_are_told():
    found = Look({"a": 16, "b": 8, "c": 4096}, {})
    norms = {"a": (3, "batch"), "b": (3, "batch"), "c": (3, "batch"), "d": (3, "batch")}
    [note] = check_components(found, norms)
    enough = "a gets 16 points from a batch, which is enough for 2 of 3 components"
    assert note == f"{enough}, and 1 other norm is short of points as well."
    [note] = check_components(found, {"c": (17, "batch")})
    assert note.startswith("17 components are many: each describes few points")
    assert check_components(found, {"c": (16, "batch")}) == []


@pytest.mark.parametrize(("mean", "deviation", "far"), [(0, 1, False), (9, 5, False), (152, 77, True), (0, 0.001, True)])
def test_labels_far_from_where_a_network_begins_are_told(mean, deviation, far):
    generator = torch.Generator().manual_seed(1)
    found = look(nn.Sequential(Plain(), nn.Linear(3, 1)), (IMAGES, mean + deviation * torch.randn(20, generator=generator)))
    note = note_of_scale(found)
    assert (note is not None) == far
    assert not far or re.match(
        r"The labels have the mean .* and the deviation .*: .* standardize them in your loaders\.", note
    )
    assert note_of_scale(look(Plain(), (IMAGES, LABELS))) is None


def test_components_of_a_model():
    model = nn.Sequential(MixtureNorm2d(4, num_components=5), nn.Sequential(MixtureNorm2d(4, population="instance")))
    assert components_of(model, (MixtureNorm2d,)) == {"0": (5, "batch"), "1.0": (3, "instance")}
