"""Model surgery: what ``convert`` leaves alone, and what ``revert`` gives back."""

import copy

import pytest
import torch
from model_helpers import (
    MIXTURE_OF,
    MIXTURES,
    MODELS,
    Nested,
    Shared,
    batch_norms,
    evaluate,
    images,
    mixture_norms,
    output,
    sequential,
    step,
    trained_model,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize, prune

import mixnorm
from mixnorm import MixtureNorm2d


@pytest.fixture(params=MODELS)
def model(request):
    return trained_model(request.param)


# --- convert and revert -------------------------------------------------------------------------------------------------


def test_convert_keeps_names_parameters_and_flags(model):
    names = {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for i, module in enumerate(model.modules()):
        module.training = i % 3 > 0
    flags = [module.training for module in model.modules()]
    settings = [(m.eps, m.momentum, m.affine, m.track_running_stats) for m in batch_norms(model)]

    converted = mixnorm.convert(model, "*", num_components=2)

    assert {name: type(m) for name, m in converted.named_modules(remove_duplicate=False)} == {
        name: MIXTURE_OF.get(kind, kind) for name, kind in names.items()
    }
    after = dict(converted.named_parameters(remove_duplicate=False))
    assert [name for name in after if not name.endswith(("within_weight", "between_weight"))] == list(parameters)
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


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 1e6), (torch.float16, 300), (torch.bfloat16, 10)], ids=str)
def test_revert_keeps_the_digits_of_the_history(dtype, offset):
    """Means that are many deviations from 0. In fp16 the square of 300 is infinite, and times an empty slot's 0 a NaN."""
    layer = MixtureNorm2d(3, num_components=2).to(dtype)
    for seed in range(9):
        x = images(seed=seed)
        x[::2] += 4
        layer(x + offset)
    weights, tau = (t.double() for t in layer.slot_weights())
    share = (weights * tau.unsqueeze(-1)).unsqueeze(-1)
    share, means, variances = share / share.sum(), layer.history_means.double(), layer.history_vars.double()
    mean = (share * means).sum((0, 1))
    variance = (share * (variances + means.square())).sum((0, 1)) - mean.square()
    norm = mixnorm.revert(layer)
    found = norm.running_mean.double(), norm.running_var.double()
    torch.testing.assert_close(found, (mean, variance), atol=1e-3, rtol=torch.finfo(dtype).eps)


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
        if name.endswith(("within_weight", "between_weight")):
            continue
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


def test_models_without_memory_can_be_converted():
    """As deferred initialization does it: build on the meta device, convert, and load."""
    expected = trained_model("sequential")
    with torch.device("meta"):
        model = mixnorm.convert(sequential())
    assert all(t.is_meta for t in model.state_dict().values())
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    torch.testing.assert_close(evaluate(model, images(seed=9)), evaluate(expected, images(seed=9)), atol=1e-5, rtol=1e-5)
    with torch.device("meta"):
        assert all(t.is_meta for t in mixnorm.revert(mixnorm.convert(sequential())).state_dict().values())


class Positive(nn.Module):
    def forward(self, x):
        return x.abs()


def test_a_weight_that_is_computed_is_not_lost_in_silence():
    pruned, parametrized = sequential(), mixnorm.convert(sequential())
    prune.l1_unstructured(pruned[1], "weight", 2)
    with pytest.raises(ValueError, match=r"'1' computes its weight.*prune.remove"):
        mixnorm.convert(pruned)
    assert not mixture_norms(pruned)
    prune.remove(pruned[1], "weight")
    assert mixnorm.convert(pruned)[1].weight.count_nonzero() == 2

    parametrize.register_parametrization(parametrized[4], "weight", Positive())
    with pytest.raises(ValueError, match=r"'4' computes its weight.*remove_parametrizations"):
        mixnorm.revert(parametrized)
    assert len(mixture_norms(parametrized)) == 2


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


class Doubled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


NESTED_NORMS = ["stem.1", "blocks.0.norm", "blocks.1.norm", "head.norm"]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("*", NESTED_NORMS),
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
    everything = mixnorm.revert(mixnorm.convert(Nested(), "*"), select)  # revert understands the same
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


@pytest.mark.parametrize("select", [1, ["stem.1", 1], nn.BatchNorm2d, nn.BatchNorm2d(4), nn.Sequential(nn.ReLU())], ids=str)
def test_select_that_is_no_name_says_what_to_give(select):
    model = Nested()
    with pytest.raises(ValueError, match=r"is no name: use a name or glob of 'stem.1'.*function of \(name, module\)"):
        mixnorm.convert(model, select)
    assert not mixture_norms(model)


@pytest.mark.parametrize("option", ["components", "affine", "num_features", "training"])
def test_unknown_option_is_an_error_that_lists_the_known(option):
    with pytest.raises(ValueError, match=f"{option!r}.*num_components"):
        mixnorm.convert(sequential(), **{option: 1})


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Linear(2, 2), "it has no norm at all"),
        (nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3), nn.GroupNorm(1, 3)), r"it has LayerNorm \(2 times\), GroupNorm"),
        (nn.Sequential(MixtureNorm2d(4)), "it has MixtureNorm2d, which is mixture norm already"),
        (nn.Sequential(nn.SyncBatchNorm(4)), "it has SyncBatchNorm: call convert before convert_sync_batchnorm"),
        (nn.Sequential(Doubled(4)), "it has Doubled, a subclass of batch norm"),
    ],
    ids=["none", "others", "converted", "synchronized", "subclass"],
)
def test_a_model_without_batch_norms_is_told_what_it_has(model, found):
    with pytest.raises(ValueError, match=f"no batch norm to convert; {found}"):
        mixnorm.convert(model)


def test_revert_of_a_model_without_mixture_norms():
    with pytest.raises(ValueError, match=r"no mixture norm to revert; it has BatchNorm2d \(2 times\)"):
        mixnorm.revert(sequential())


def test_subclass_with_its_own_forward_is_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(3), Doubled(3))
    own = model[1]
    mixnorm.convert(model)
    assert model[1] is own
    assert type(own) is Doubled
    assert isinstance(model[0], MixtureNorm2d)
    with pytest.raises(ValueError, match="no batch norm"):
        mixnorm.convert(nn.Sequential(Doubled(3)))


@pytest.mark.parametrize("track", [True, False])
def test_a_batch_norm_whose_statistics_were_taken_away(track):
    """It normalizes by the batch in evaluation, and so does what it becomes."""
    norm = nn.BatchNorm2d(3, track_running_stats=track)
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    layer = mixnorm.convert(copy.deepcopy(norm), num_components=1).eval()
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(layer(x), norm.eval()(x), atol=1e-5, rtol=1e-5)
