"""Numbers of mixture norms for loggers, from any training loop."""

import pytest
import torch
from layer_helpers import points
from torch import nn

import mixnorm
from mixnorm.integrations.watch import numbers, watch
from mixnorm.options import GATES


def new_model(**options):
    torch.manual_seed(0)
    return mixnorm.convert(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), form="paper", **options
    )


def pass_through(model, batches):
    for seed, size in enumerate(batches):
        model(points(size, 6, seed=seed))


def test_every_so_many_batches_of_training_are_logged():
    model, lines = new_model(num_components=2), []
    watching = watch(model, lambda values, step: lines.append((step, dict(values))), every=3)
    pass_through(model, [32] * 4)
    model.eval()
    pass_through(model, [32] * 5)
    model.train()
    pass_through(model, [32] * 2)
    assert [step for step, _ in lines] == [3, 6]
    norm = model[1]
    weights = sorted(norm.mixture.weights.tolist(), reverse=True)
    expected = {"components": norm.effective_components(), "weight_1": weights[0], "weight_2": weights[1], "few_points": 0}
    assert lines[-1][1] == {f"mixture_norm/1/{name}": pytest.approx(value) for name, value in expected.items()}
    assert watching.log(7)["mixture_norm/1/components"] == norm.effective_components()
    assert lines[-1][0] == 7
    watching.remove()
    pass_through(model, [32] * 6)
    assert len(lines) == 3


def test_learned_gates_are_told_as_their_mean():
    model = new_model(within="learned", between="learned", deviation="learned")
    told = numbers(model)
    assert told == {f"mixture_norm/1/{name}": gate.batch_norm for name, gate in GATES.items()}  # there is no batch yet
    with torch.no_grad():
        model[1].within_weight.copy_(torch.tensor([0.0, 0.5, 0.5, 1.0]))
    assert numbers(model)["mixture_norm/1/within"] == 0.5
    assert not [name for name in numbers(new_model()) if name.endswith(("within", "between", "deviation"))]


@pytest.mark.filterwarnings("ignore:a batch of")
def test_the_share_of_batches_with_few_points():
    model, lines = new_model(num_components=2), []
    watch(model, lambda values, step: lines.append(values["mixture_norm/1/few_points"]), every=4)
    pass_through(model, [32, 15, 16, 2, 32, 32, 32, 9])
    assert lines == [0.5, 0.25]


@pytest.mark.filterwarnings("ignore:a batch of")
@pytest.mark.parametrize(
    ("options", "few"),
    [
        ({"population": "batch"}, 0),  # 4 images of 5 points
        ({"population": "channel"}, 0),
        ({"population": "instance"}, 1),  # 5 points
        ({"population": "layer"}, 0),  # 5 · 6
        ({"population": "group", "num_groups": 3}, 1),  # 5 · 2
    ],
)
def test_points_are_those_that_share_a_mixture(options, few):
    layer, lines = mixnorm.MixtureNorm1d(6, num_components=2, **options), []
    watch(layer, lambda values, step: lines.append(values), every=1)
    layer(points(4, 6, 5))
    assert lines[0]["mixture_norm//few_points"] == few
    assert 1 <= lines[0]["mixture_norm//components"] <= 2


def test_a_compiled_model_is_watched_with_the_names_of_the_plain_one():
    model, lines = new_model(num_components=2), []
    compiled = torch.compile(model, backend="eager")
    watch(compiled, lambda values, step: lines.append((step, values)), every=2)
    pass_through(compiled, [32] * 4)
    assert [step for step, _ in lines] == [2, 4]
    assert set(lines[0][1]) == {f"mixture_norm/1/{name}" for name in ("components", "weight_1", "weight_2")}


def test_what_cannot_be_watched_says_so():
    with pytest.raises(ValueError, match=r"no mixture norm to watch: call mixnorm.convert\(model\) first"):
        watch(nn.Linear(2, 2), print)
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        watch(new_model(), print, every=0)
