"""What ``convert`` does to whoever just tries it: the model starts as it was, and nothing is taken that had better stay."""

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from model_helpers import MIXTURES, MODELS, batch_norms, evaluate, images, output, trained_model
from sklearn.datasets import load_digits
from torch import nn

import mixnorm

FIXED = {"scale": "unit", "within": 0.0, "between": 1.0}  # the gates where they start


def names_of_mixture_norms(model):
    return [name for name, module in model.named_modules() if isinstance(module, MIXTURES)]


# --- training --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_in_training_what_batch_norm_does(name, components):
    """Output, gradients and running statistics of a first step, for any K; γ, β and the input alike."""
    before = trained_model(name).double()
    after = mixnorm.convert(copy.deepcopy(before), "*", num_components=components)
    x, upstream = images(seed=5, dtype=torch.float64), None
    found = []
    for model in (before.train(), after.train()):
        points = x.clone().requires_grad_()
        y = output(model, points)
        upstream = torch.randn_like(y) if upstream is None else upstream
        y.backward(upstream)
        found.append((y.detach(), points.grad, {name: p.grad for name, p in model.named_parameters()}))
    (y, dx, gradients), (own_y, own_dx, own_gradients) = found
    torch.testing.assert_close(own_y, y, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(own_dx, dx, atol=1e-8, rtol=1e-8)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(own_gradients[parameter], gradient, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("momentum", [0.1, 0.3, 1.0])
def test_the_batches_before_count_as_in_batch_norm(momentum):
    """Until they leave the history: running statistics of a converted norm are those that batch norm would have."""
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    norm(images(dtype=torch.float64))
    converted = mixnorm.convert(copy.deepcopy(norm), num_components=3)
    for seed in range(1, 6):
        x = images(seed=seed, dtype=torch.float64) * seed
        norm(x)
        converted(x)
        back = mixnorm.revert(copy.deepcopy(converted))
        torch.testing.assert_close(back.running_mean, norm.running_mean, atol=1e-9, rtol=1e-9)
        # Batch norm keeps the unbiased variance of a batch, of 648 points here.
        torch.testing.assert_close(back.running_var, norm.running_var, atol=1e-9, rtol=2 / 648)


def test_the_batches_before_leave_the_history_after_t_batches():
    converted = mixnorm.convert(trained_model("root"), history=4)
    for seed in range(4):
        converted(images(seed=seed))
    torch.testing.assert_close(converted.history_weights.sum(-1), torch.ones(4))


def digits():
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return x[order[:1200]], y[order[:1200]], x[order[1200:]], y[order[1200:]]


def small_network():
    def block(i, o):
        return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]

    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 64), *last)


def fine_tune(model, steps, lr):
    """Trains on digits; returns the accuracy in % after every second step."""
    x, y, test_x, test_y = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        batch = torch.randint(len(y), (64,), generator=generator)
        F.cross_entropy(model.train()(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            continue
        with torch.no_grad():
            found.append(100 * (model.eval()(test_x).argmax(1) == test_y).float().mean().item())
    return torch.tensor(found)


def test_fine_tuning_stays_within_a_point_of_batch_norm_all_along_200_steps():
    """The paper's form, which moves all modes to mean 0 at once, loses four to five points in forty steps."""
    torch.manual_seed(0)
    checkpoint = small_network()
    assert fine_tune(checkpoint, 250, 3e-3)[-1] > 97
    batch_norm = fine_tune(copy.deepcopy(checkpoint), 200, 1e-4)
    torch.manual_seed(1)
    converted = mixnorm.convert(copy.deepcopy(checkpoint), "*")
    gated = fine_tune(converted, 200, 1e-4)
    assert (batch_norm - gated).max() <= 1
    assert all(layer.within_weight.abs().max() > 0 for layer in converted.modules() if isinstance(layer, MIXTURES))
    paper = fine_tune(mixnorm.convert(copy.deepcopy(checkpoint), "*", form="paper"), 40, 1e-4)
    assert (batch_norm[:20] - paper).max() > 3


# --- what is taken ---------------------------------------------------------------------------------------------------------


def classifier(*last):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), *last)


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        (classifier(nn.Flatten(), nn.Linear(8, 5)), ["1"]),
        (classifier(nn.Conv2d(8, 5, 1)), ["1"]),
        (classifier(), ["1", "4"]),  # no layer behind
        (classifier(nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), ["1", "4"]),  # not the last but one
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), ["2"]),  # colours
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5)), ["1"]),  # the only one
    ],
    ids=["linear", "convolution", "nothing", "two linear", "three channels", "one norm"],
)
def test_what_is_taken_by_itself(model, taken):
    everything = [name for name, module in model.named_modules() if module in batch_norms(model)]
    assert names_of_mixture_norms(mixnorm.convert(copy.deepcopy(model))) == taken
    assert names_of_mixture_norms(mixnorm.convert(copy.deepcopy(model), "*")) == everything
    assert names_of_mixture_norms(mixnorm.convert(copy.deepcopy(model), everything[-1])) == everything[-1:]


def test_the_last_norm_of_a_residual_network_stays(caplog):
    model = mixnorm.convert(MODELS["resnet"]())
    [stays] = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert stays == "resnet.encoder.stages.1.layers.1.layer.1.normalization"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{stays!r} stays, because the last layer reads from it" in record.getMessage()
    assert "select='*'" in record.getMessage()


def test_nothing_is_logged_loudly_where_all_are_taken(caplog):
    caplog.set_level(logging.INFO)
    mixnorm.convert(MODELS["sequential"](), "1")
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, "mixnorm converted 1 of 2 batch norms")


# --- forms -----------------------------------------------------------------------------------------------------------------


def test_forms_and_options():
    def layer(**options):
        return mixnorm.convert(nn.BatchNorm2d(8), **options)

    assert (layer().scale, layer().within, layer().between) == ("unit", "learned", "learned")
    assert (layer(within=0.5).within, layer(within=0.5).between) == (0.5, "learned")
    assert layer(num_components=1).within_weight is None  # nothing to gate
    paper = layer(form="paper", activation="relu")
    assert (paper.scale, paper.within, paper.between, paper.activation) == ("fisher", 1.0, 0.0, "relu")
    with pytest.raises(ValueError, match=r"form='papers'.*'gated', 'paper'"):
        layer(form="papers")
    for options in ({"affine_mode": "statistics"}, {"inference": "paper"}):
        assert layer(form="paper", **options)
        with pytest.raises(ValueError, match="add form='paper'"):
            layer(**options)


def test_evaluation_of_the_forms_starts_as_batch_norms():
    model = trained_model("resnet")
    expected = evaluate(model, images(seed=9))
    for form in ("gated", "paper"):
        converted = mixnorm.convert(copy.deepcopy(model), form=form)
        torch.testing.assert_close(evaluate(converted, images(seed=9)), expected, atol=1e-5, rtol=1e-5)


# --- gates that nobody trains ----------------------------------------------------------------------------------------------


def train_with(optimizer, model, steps=60):
    for seed in range(steps):
        model.train()(images(seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model.eval()(images())
    return [str(one.message) for one in told]


def test_an_optimizer_that_does_not_know_the_gates_is_told():
    model = trained_model("sequential")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = train_with(optimizer, mixnorm.convert(model, "1"))
    assert len(told) == 1
    assert "within_weight and between_weight" in told[0]
    assert "build the optimizer after mixnorm.convert" in told[0]


def test_gates_that_train_or_that_should_not_are_not_told():
    model = mixnorm.convert(trained_model("sequential"), "1")
    assert train_with(torch.optim.SGD(model.parameters(), lr=0.01), model) == []
    model = mixnorm.convert(trained_model("sequential"), "1")
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    for gate in (model[1].within_weight, model[1].between_weight):
        gate.requires_grad_(False)
    assert train_with(optimizer, model) == []
    model = mixnorm.convert(trained_model("sequential"), "1", **FIXED)
    assert train_with(torch.optim.SGD(model.parameters(), lr=0.01), model) == []


def test_gates_of_a_norm_that_does_not_train_do_not_train():
    model = mixnorm.convert(trained_model("sequential").requires_grad_(False))
    assert not any(p.requires_grad for p in model.parameters())


def test_gates_of_a_lazy_norm_that_does_not_train_do_not_train():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    for parameter in model.parameters():
        parameter.requires_grad = False
    mixnorm.convert(model)
    model(images())
    assert model[0].within_weight.shape == (3,)
    assert not any(p.requires_grad for p in model.parameters())


# --- what may not surprise -------------------------------------------------------------------------------------------------


def trained_without_its_gates():
    """A converted model after 60 steps of an optimizer that does not know the gates, in evaluation."""
    model = mixnorm.convert(trained_model("sequential"), "1")
    for seed in range(60):
        model.train()(images(seed=seed)).square().mean().backward()
    return model.eval()


def test_a_compiled_evaluation_is_compiled_once_while_training_goes_on_without_a_compiler():
    torch._dynamo.reset()
    model = mixnorm.convert(trained_model("sequential"), "1")
    compiled = torch.compile(model[1], backend="eager", fullgraph=True)
    x = model[0](images())
    for epoch in range(3):
        model.train()(images(seed=epoch))
        model.eval()
        with torch.compiler.set_stance("fail_on_recompile" if epoch else "default"):
            found = compiled(x)
        torch.testing.assert_close(found, model[1](x), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_gates_that_are_computed_from_other_parameters_are_looked_at():
    """They are no parameters of the layer, as in the replicas of DataParallel and in a flat FSDP model."""
    model = trained_without_its_gates()
    nn.utils.parametrize.register_parametrization(model[1], "within_weight", nn.Identity())
    with pytest.warns(UserWarning, match="within_weight and between_weight"):
        model(images())


def test_gates_of_a_checkpoint_are_not_told_of_the_batches_before():
    """As after a search for a learning rate, which trains and then goes back to the beginning."""
    model = mixnorm.convert(trained_model("sequential"), "1")
    beginning = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(60):
        model.train()(images(seed=seed)).square().mean().backward()
        optimizer.step()
    model.load_state_dict(beginning)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.eval()(images())
    assert not told


def test_a_recomputed_batch_counts_once_for_the_gates():
    model = mixnorm.convert(trained_model("sequential"), "1")
    for seed in range(4):
        torch.utils.checkpoint.checkpoint(model.train(), images(seed=seed), use_reentrant=False).sum().backward()
    assert model[1]._batches_with_gradient == 4


def test_a_pickled_layer_of_an_earlier_version_trains_and_evaluates():
    layer = mixnorm.MixtureNorm2d(3)
    layer.__dict__.pop("_batches_with_gradient", None)  # which version 0.1 did not have
    layer(images())
    assert layer.eval()(images()).isfinite().all()


def test_a_second_conversion_leaves_the_norms_that_stayed_in_the_first(caplog):
    model = mixnorm.convert(classifier(nn.Flatten(), nn.Linear(8, 5)))
    assert names_of_mixture_norms(mixnorm.convert(model)) == ["1"]
    assert "converted 0 of 1 batch norms" in caplog.records[-1].getMessage()
    assert names_of_mixture_norms(mixnorm.convert(model, "*")) == ["1", "4"]


def test_each_norm_is_counted_once_however_often_it_is_named_or_used(caplog):
    caplog.set_level(logging.INFO)
    shared = nn.BatchNorm2d(8)
    model = nn.Sequential(shared, nn.Conv2d(8, 8, 1), shared, nn.ReLU(), nn.BatchNorm2d(8))
    mixnorm.convert(model, ["0", "*"])
    assert caplog.records[-1].getMessage() == "mixnorm converted 2 of 2 batch norms"


def test_gates_of_norms_without_parameters_do_not_train_in_a_frozen_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False))
    mixnorm.convert(model.requires_grad_(False))
    assert not any(p.requires_grad for p in model.parameters())
    assert mixnorm.convert(nn.BatchNorm2d(8, affine=False)).within_weight.requires_grad


@pytest.mark.parametrize("momentum", [1e-5, 1e-300])
def test_a_batch_norm_that_hardly_moves_fits_in_half_precision(momentum):
    norm = nn.BatchNorm2d(3)
    norm(images())
    norm.momentum = momentum
    expected = copy.deepcopy(norm).half().eval()(images().half())
    converted = mixnorm.convert(copy.deepcopy(norm)).half(), mixnorm.convert(copy.deepcopy(norm).half())
    for layer in converted:
        torch.testing.assert_close(layer.eval()(images().half()), expected, atol=1e-2, rtol=1e-2)
