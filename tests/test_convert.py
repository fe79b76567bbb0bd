"""Model surgery: what ``convert`` leaves alone, what ``revert`` gives back, and norms that are frozen or refilled."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn
from transformers import ResNetConfig, ResNetForImageClassification

import mixnorm
from mixnorm import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d

MIXTURE_OF = {nn.BatchNorm1d: MixtureNorm1d, nn.BatchNorm2d: MixtureNorm2d, nn.BatchNorm3d: MixtureNorm3d}
MIXTURES = tuple(MIXTURE_OF.values())


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


class Nested(nn.Module):
    """Norms two levels deep, in a list and in a dictionary, of two ranks and with unusual settings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=None))
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.head = nn.ModuleDict({"norm": nn.BatchNorm1d(4, momentum=0.3, affine=False), "linear": nn.Linear(4, 5)})

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head["linear"](self.head["norm"](x.mean((2, 3))))


class Shared(nn.Module):
    """One norm under two names, and one block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.alias = self.norm
        block = Block(3)
        self.first, self.second = nn.Sequential(block), nn.Sequential(block)

    def forward(self, x):
        return self.alias(self.second(self.first(self.norm(x))))


def sequential():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


def resnet():
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config)


MODELS = {"sequential": sequential, "nested": Nested, "shared": Shared, "root": lambda: nn.BatchNorm2d(3), "resnet": resnet}


def images(count=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 9, 9, generator=generator).mul(2).add(1).to(dtype)


def output(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.logits


def evaluate(model, x):
    """The output in evaluation mode, with the training flags left as they are."""
    with torch.no_grad():
        return output(copy.deepcopy(model).eval(), x)


def step(model, x, seed=0):
    """A forward and a backward pass with a random upstream gradient."""
    y = output(model, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype))
    return y.detach()


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def batch_norms(model):
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


def mixture_norms(model):
    return [m for m in model.modules() if isinstance(m, MIXTURES)]


@pytest.fixture(params=MODELS)
def model(request):
    """Every model, with parameters and running statistics that are not those of a new one."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    for norm in batch_norms(model):
        if norm.affine:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -1, 1)
    with torch.no_grad():
        for seed in range(3):
            model(images(seed=seed))
    return model


# --- convert and revert -------------------------------------------------------------------------------------------------


def test_convert_keeps_names_parameters_and_flags(model):
    names = {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for i, module in enumerate(model.modules()):
        module.training = i % 3 > 0
    flags = [module.training for module in model.modules()]
    settings = [(m.eps, m.momentum, m.affine, m.track_running_stats) for m in batch_norms(model)]

    converted = mixnorm.convert(model, num_components=2)

    assert {name: type(m) for name, m in converted.named_modules(remove_duplicate=False)} == {
        name: MIXTURE_OF.get(kind, kind) for name, kind in names.items()
    }
    after = dict(converted.named_parameters(remove_duplicate=False))
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    assert set(parameters) <= set(converted.state_dict())
    assert [module.training for module in converted.modules()] == flags
    assert [(m.eps, m.momentum, m.affine, m.track_running_stats) for m in mixture_norms(converted)] == settings
    assert all(m.num_components == 2 for m in mixture_norms(converted))
    assert converted is model or isinstance(model, _BatchNorm)


def test_a_shared_norm_stays_one_module():
    model = mixnorm.convert(Shared(), "alias")
    assert model.norm is model.alias
    assert isinstance(model.norm, MixtureNorm2d)
    model = mixnorm.convert(model, "second.*")
    assert model.first[0] is model.second[0]
    assert model.first[0].norm is model.second[0].norm
    assert len(mixture_norms(model)) == 2
    assert model.norm.num_batches_tracked == 0
    output(model, images())
    assert model.norm.num_batches_tracked == 2  # once for each of its uses


@pytest.mark.parametrize("options", [{}, {"inference": "pooled"}, {"population": "channel"}, {"num_components": 1}], ids=str)
def test_evaluation_right_after_convert_is_batch_norms(model, options):
    before = evaluate(model, images(seed=9))
    torch.testing.assert_close(evaluate(mixnorm.convert(model, **options), images(seed=9)), before, atol=1e-5, rtol=1e-5)


def test_revert_gives_the_original_back(model):
    original, parameters = copy.deepcopy(model), dict(model.named_parameters())
    back = mixnorm.revert(mixnorm.convert(model))

    assert [type(m) for m in back.modules()] == [type(m) for m in original.modules()]
    assert [name for name, _ in back.named_parameters()] == list(parameters)
    assert all(p is parameters[name] for name, p in back.named_parameters())
    torch.testing.assert_close(back.state_dict(), original.state_dict(), atol=1e-6, rtol=1e-6)  # num_batches_tracked too
    torch.testing.assert_close(evaluate(back, images(seed=9)), evaluate(original, images(seed=9)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step(back, images(seed=9)), step(original, images(seed=9)))
    torch.testing.assert_close(back.state_dict(), original.state_dict(), atol=1e-6, rtol=1e-6)
    assert [(m.eps, m.momentum) for m in batch_norms(back)] == [(m.eps, m.momentum) for m in batch_norms(original)]


def test_revert_after_training_gives_the_moments_of_the_history():
    """At K = 1 with an even history, the overall mean is that of the batches, and the variance adds their spread."""
    model = mixnorm.convert(nn.Sequential(nn.BatchNorm2d(3, momentum=None)), num_components=1)
    batches = [images(seed=seed) * (1 + seed) for seed in range(4)]
    for x in batches:
        model(x)
    norm = mixnorm.revert(model)[0]
    everything = torch.cat(batches)
    torch.testing.assert_close(norm.running_mean, everything.mean((0, 2, 3)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.running_var, everything.var((0, 2, 3), correction=0), atol=1e-4, rtol=1e-5)
    assert norm.num_batches_tracked == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_carries_over(dtype):
    model = sequential().to(dtype)
    for norm in mixture_norms(mixnorm.convert(model)):
        assert {t.dtype for t in norm.state_dict().values()} == {dtype, torch.int64}
    assert output(model, images(dtype=dtype)).dtype == dtype
    assert {p.dtype for p in mixnorm.revert(model).parameters()} == {dtype}


def test_optimizer_from_before_still_updates(model):
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    converted = mixnorm.convert(model)
    before = {name: p.detach().clone() for name, p in converted.named_parameters()}
    step(converted, images())
    optimizer.step()
    for name, p in converted.named_parameters():
        assert p is parameters[name]
        if name.endswith(("weight", "norm.bias")):
            assert not torch.equal(p, before[name]), name


def test_parameters_that_do_not_train_still_do_not():
    model = sequential().requires_grad_(False)
    assert not any(p.requires_grad for p in mixnorm.convert(model).parameters())
    assert not any(p.requires_grad for p in mixnorm.revert(model).parameters())


def test_a_failed_convert_changes_nothing():
    """The first norm has 4 channels, which 4 groups divide; the second has 5, which they do not."""
    model = sequential()
    modules = list(model.modules())
    with pytest.raises(ValueError, match="num_groups=4"):
        mixnorm.convert(model, population="group", num_groups=4)
    assert list(model.modules()) == modules


# --- hooks --------------------------------------------------------------------------------------------------------------

FORWARD_AND_BACKWARD_HOOKS = [
    ("register_forward_pre_hook", {}),
    ("register_forward_pre_hook", {"with_kwargs": True}),
    ("register_forward_hook", {}),
    ("register_forward_hook", {"with_kwargs": True}),
    ("register_forward_hook", {"always_call": True}),
    ("register_full_backward_pre_hook", {}),
    ("register_full_backward_hook", {}),
]


@pytest.mark.parametrize("there_and_back", [False, True], ids=["convert", "revert"])
@pytest.mark.parametrize(("register", "options"), FORWARD_AND_BACKWARD_HOOKS, ids=str)
def test_hooks_fire_once_and_their_handles_remove_them(register, options, there_and_back):
    model, calls = sequential(), []
    handle = getattr(model[1], register)(lambda *args: calls.append(args[0]), **options)
    mixnorm.convert(model)
    if there_and_back:
        mixnorm.revert(model)
    step(model, images())
    assert len(calls) == 1
    assert calls[0] is model[1]
    handle.remove()
    step(model, images())
    assert len(calls) == 1


def test_backward_hook_sees_the_gradient_of_the_input():
    """A full backward hook must stay one: it is given the gradients of the module's inputs and outputs."""
    model, seen = nn.Sequential(nn.BatchNorm2d(3)), []
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append((grad_input, grad_output)))
    mixnorm.convert(model)
    x, upstream = images().requires_grad_(), torch.randn(8, 3, 9, 9)
    model(x).backward(upstream)
    [(grad_input, grad_output)] = seen
    assert len(grad_input) == 1
    torch.testing.assert_close(grad_input[0], x.grad)
    torch.testing.assert_close(grad_output[0], upstream)


@pytest.mark.parametrize(
    "register",
    [
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_state_dict_hooks_fire_once(register):
    model, calls = sequential(), []
    getattr(model[1], register)(lambda module, *rest: calls.append(module))
    mixnorm.convert(model)
    model.load_state_dict(model.state_dict())
    assert len(calls) == 1
    assert calls[0] is model[1]


# --- select -------------------------------------------------------------------------------------------------------------

NESTED_NORMS = ["stem.1", "blocks.0.norm", "blocks.1.norm", "head.norm"]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (None, NESTED_NORMS),
        ("stem.1", ["stem.1"]),
        ("blocks", ["blocks.0.norm", "blocks.1.norm"]),
        ("blocks.*", ["blocks.0.norm", "blocks.1.norm"]),
        ("*.norm", ["blocks.0.norm", "blocks.1.norm", "head.norm"]),
        ("blocks.[1]*", ["blocks.1.norm"]),
        (["stem", "head.*"], ["stem.1", "head.norm"]),
        (("stem.1", "*.1"), ["stem.1"]),
        (lambda name, module: module.num_features == 4 and name.startswith("b"), ["blocks.0.norm", "blocks.1.norm"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else repr(value),
)
def test_select_chooses(select, expected):
    model = mixnorm.convert(Nested(), select)
    assert [name for name, m in model.named_modules() if isinstance(m, MIXTURES)] == expected
    everything = mixnorm.revert(mixnorm.convert(Nested()), select)  # revert understands the same
    assert [name for name, m in everything.named_modules() if isinstance(m, _BatchNorm)] == expected


@pytest.mark.parametrize(
    "select",
    ["block", "stem.2", "Stem.*", ["stem", "tail"], [], lambda name, module: False],
    ids=lambda value: value.__name__ if callable(value) else repr(value),
)
def test_select_that_matches_nothing_lists_the_candidates(select):
    model = Nested()
    with pytest.raises(ValueError, match="select") as error:
        mixnorm.convert(model, select)
    assert all(name in str(error.value) for name in NESTED_NORMS)
    assert not mixture_norms(model)  # also where another pattern of the list did match


@pytest.mark.parametrize("option", ["components", "affine", "num_features", "training"])
def test_unknown_option_is_an_error_that_lists_the_known(option):
    with pytest.raises(ValueError, match=f"{option!r}.*num_components"):
        mixnorm.convert(sequential(), **{option: 1})


def test_a_model_without_norms_is_an_error():
    with pytest.raises(ValueError, match="no batch norm"):
        mixnorm.convert(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="no mixture norm"):
        mixnorm.revert(sequential())


def test_subclass_with_its_own_forward_is_left_alone():
    class Doubled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.BatchNorm2d(3), Doubled(3))
    own = model[1]
    mixnorm.convert(model)
    assert model[1] is own
    assert type(own) is Doubled
    assert isinstance(model[0], MixtureNorm2d)
    with pytest.raises(ValueError, match="no batch norm"):
        mixnorm.convert(nn.Sequential(Doubled(3)))


def test_synchronize_says_that_it_is_missing():
    with pytest.raises(NotImplementedError, match=r"synchronize.*processes"):
        mixnorm.synchronize(mixnorm.convert(sequential()))


# --- freeze -------------------------------------------------------------------------------------------------------------


def both_norms(**options):
    """A model with a mixture norm (1) and a batch norm (4)."""
    torch.manual_seed(0)
    model = mixnorm.convert(sequential(), "1", **options)
    for seed in range(2):
        model(images(seed=seed))
    return model


COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("options", [{}, {"inference": "pooled"}, {"population": "channel"}], ids=str)
def test_freeze_holds_the_statistics_and_lets_gradients_through(options, copied):
    model = both_norms(**options)
    keys, expected = list(model.state_dict()), evaluate(model, images(seed=9))
    model = COPIES[copied](mixnorm.freeze(model))
    before = statistics(model)
    model.train()
    assert model.training
    assert not model[1].training
    assert not model[4].training
    assert list(model.state_dict()) == keys

    x = images(seed=9).requires_grad_()
    torch.testing.assert_close(step(model, x), expected)
    torch.testing.assert_close(statistics(model), before, atol=0, rtol=0, equal_nan=True)
    for tensor in (x, model[1].weight, model[1].bias, model[4].weight, model[4].bias):
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
def test_unfreeze_undoes_freeze(training):
    model = both_norms()
    kinds = [type(m) for m in model.modules()]
    mixnorm.unfreeze(mixnorm.freeze(model).train(training))
    assert [type(m) for m in model.modules()] == kinds
    assert all(m.training == training for m in model.modules())
    model.train()
    before = statistics(model)
    model(images(seed=9))
    after = statistics(model)
    assert after["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 1
    assert not torch.equal(after["1.history_means"], before["1.history_means"])
    assert not torch.equal(after["4.running_mean"], before["4.running_mean"])


def test_frozen_norms_stay_frozen_through_convert_and_revert():
    model = mixnorm.freeze(sequential())
    for surgery in (mixnorm.convert, mixnorm.revert):
        surgery(model).train()
        assert not model[1].training
        assert not model[4].training
    mixnorm.unfreeze(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert model[1].training


# --- recalibrate --------------------------------------------------------------------------------------------------------


def test_recalibrate_gives_batch_norm_the_plain_mean_over_the_batches(model):
    """The same as PyTorch's own function for this, on a copy."""
    batches = [images(seed=seed) for seed in range(5)]
    expected = copy.deepcopy(model)
    update_bn(batches, expected)
    momenta = [m.momentum for m in batch_norms(model)]
    mixnorm.recalibrate(model, batches)
    torch.testing.assert_close(statistics(model), statistics(expected), atol=1e-6, rtol=1e-6)
    assert [m.momentum for m in batch_norms(model)] == momenta


@pytest.mark.parametrize("count", [2, 4, 7])
def test_recalibrate_fills_the_history_with_the_last_batches(count):
    """At K = 1 a batch's mixture is its mean and variance. T = 4."""
    layer = mixnorm.convert(nn.BatchNorm2d(3), num_components=1, history=4)
    for seed in range(20, 26):
        layer(images(seed=seed) + 50)  # the past, which must not show
    batches = [images(seed=seed) * (1 + seed) for seed in range(count)]
    mixnorm.recalibrate(layer, iter(batches))
    kept = torch.stack(batches[-4:])
    filled = len(kept)
    assert layer.num_batches_tracked == count
    torch.testing.assert_close(layer.history_means[-filled:, 0], kept.mean((1, 3, 4)), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(layer.history_vars[-filled:, 0], kept.var((1, 3, 4), correction=0), atol=1e-3, rtol=1e-5)
    assert layer.history_weights.flatten().tolist() == [0.0] * (4 - filled) + [1.0] * filled


class Recorder(nn.Module):
    """Dropout, then a norm; it takes an input and a mask, and notes what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm, self.seen = nn.Dropout(0.5), mixnorm.MixtureNorm2d(3, num_components=1), []

    def forward(self, x, mask=None):
        self.seen.append((x, mask))
        return self.norm(self.dropout(x))


@pytest.mark.parametrize(
    ("wrap", "with_mask"),
    [
        (lambda x, mask: x, False),
        (lambda x, mask: (x, "label"), False),
        (lambda x, mask: [x, "label"], False),
        (lambda x, mask: {"x": x, "mask": mask}, True),
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_recalibrate_takes_any_batch_and_turns_dropout_off(wrap, with_mask):
    model, mask = Recorder(), torch.ones(1)
    batches = [images(seed=seed) for seed in range(2)]
    mixnorm.recalibrate(model, [wrap(x, mask) for x in batches])
    assert [seen is x for (seen, _), x in zip(model.seen, batches, strict=True)] == [True, True]
    assert all((m is mask) == with_mask for _, m in model.seen)
    torch.testing.assert_close(model.norm.history_means[-1, 0], batches[-1].mean((0, 2, 3)))  # nothing was dropped


def test_recalibrate_of_a_transformers_model_takes_its_keyword_arguments():
    model = mixnorm.convert(resnet())
    mixnorm.recalibrate(model, [{"pixel_values": images(seed=seed)} for seed in range(3)])
    assert {int(m.num_batches_tracked) for m in mixture_norms(model)} == {3}


def test_recalibrate_restores_training_flags():
    model = both_norms()
    for i, module in enumerate(model.modules()):
        module.training = i % 2 == 0
    flags = [m.training for m in model.modules()]
    mixnorm.recalibrate(model, [images()])
    assert [m.training for m in model.modules()] == flags


def stops_in_the_middle():
    yield images()
    yield images(seed=1)
    raise KeyboardInterrupt


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
@pytest.mark.parametrize("inference", ["ensemble", "pooled"])
@pytest.mark.parametrize(
    ("batches", "error"), [(list, ValueError), (stops_in_the_middle, KeyboardInterrupt)], ids=["empty", "interrupted"]
)
def test_recalibrate_that_fails_leaves_everything_as_it_was(batches, error, inference, trained):
    model = both_norms(inference=inference) if trained else mixnorm.convert(sequential(), "1", inference=inference)
    model[0].eval()
    before, y = statistics(model), evaluate(model, images(seed=9))
    flags, momentum = [m.training for m in model.modules()], model[4].momentum
    with pytest.raises(error):
        mixnorm.recalibrate(model, batches())
    torch.testing.assert_close(statistics(model), before, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(evaluate(model, images(seed=9)), y, atol=0, rtol=0)
    assert [m.training for m in model.modules()] == flags
    assert model[4].momentum == momentum


def test_recalibrate_leaves_frozen_norms_alone():
    model = nn.Sequential(mixnorm.freeze(both_norms()), nn.BatchNorm2d(5))
    before = statistics(model[0])
    mixnorm.recalibrate(model, [images(seed=9)])
    torch.testing.assert_close(statistics(model[0]), before, atol=0, rtol=0)
    assert model[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match="no norm"):
        mixnorm.recalibrate(model[0], [images()])
