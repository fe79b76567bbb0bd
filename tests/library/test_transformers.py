"""Models of transformers with mixture norms: what is saved and loaded again computes the same, to the bit."""

import copy
import json

import pytest
import torch
from layer_helpers import points
from torch import nn
from transformers import AutoModel, AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification, ResNetModel

import mixnorm
from mixnorm.integrations.description import describe, rebuild
from mixnorm.integrations.transformers import from_pretrained, record, save_pretrained

X = points(16, 3, 16, 16)
OPTIONS = {
    "defaults": {},
    "learned": {"within": "learned", "between": "learned", "deviation": "learned", "scale": "unit"},
    "component affine": {"component_affine": True, "seeding": "warm", "num_components": 2},
    "pooled": {"inference": "pooled", "num_components": 2},
    "channel": {"population": "channel", "inference": "mixture"},
    "group": {"population": "group", "num_groups": 4, "num_components": 2},
    "rest": {"history": 3, "seeding": 5, "momentum": None, "affine_mode": "statistics", "max_samples": None},
}


def new_model():
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4}
    return ResNetForImageClassification(ResNetConfig(num_channels=3, layer_type="basic", **sizes))


def trained(model, batches=2):
    """The model after a few batches, with parameters that are no initial values."""
    torch.manual_seed(1)
    model.train()
    for _ in range(batches):
        model(pixel_values=X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def assert_equal(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value.nan_to_num(), theirs[key].nan_to_num()), key  # slots of samples that are empty are NaN
        assert value.dtype == theirs[key].dtype
    x = X.to(one.dtype)
    assert torch.equal(one(x).logits, other(x).logits)
    assert describe(one) == describe(other)


@pytest.mark.filterwarnings("ignore:a batch of")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_converted_model_comes_back_to_the_bit(options, dtype, tmp_path):
    model = trained(mixnorm.convert(new_model(), "*", form="paper", **options)).to(dtype)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(ResNetForImageClassification, tmp_path)
    assert type(loaded) is ResNetForImageClassification
    assert not loaded.training
    assert_equal(model, loaded)
    # And both go on alike.
    for one in (model, loaded):
        trained(one.float())
    assert_equal(model, loaded)


def test_layers_may_differ_and_some_may_stay_batch_norms(tmp_path):
    model = new_model()
    mixnorm.convert(model, "resnet.encoder.stages.0.*", num_components=2, form="paper", within="learned")
    mixnorm.convert(model, "*.shortcut.*", num_components=5, form="paper")
    mixnorm.freeze(model)
    mixnorm.unfreeze(model.resnet.encoder.stages[0])
    save_pretrained(trained(model), tmp_path)
    loaded = from_pretrained(ResNetForImageClassification, tmp_path)
    assert_equal(model, loaded)
    kinds = [type(m) for m in loaded.modules() if isinstance(m, (mixnorm.MixtureNorm2d, nn.BatchNorm2d))]
    assert kinds.count(mixnorm.MixtureNorm2d) == 3
    assert len(kinds) == 6
    assert loaded.train().resnet.encoder.stages[1].layers[0].shortcut.normalization.training is False  # frozen still


def test_lazy_layers_once_they_know_their_channels(tmp_path):
    model = new_model()
    model.resnet.embedder.embedder.normalization = mixnorm.LazyMixtureNorm2d(num_components=2)
    with pytest.raises(ValueError, match=r"embedder.normalization' has not seen a batch"):
        save_pretrained(model, tmp_path)
    save_pretrained(trained(model), tmp_path)
    assert_equal(model, from_pretrained(ResNetForImageClassification, tmp_path))


def test_a_distilled_model(tmp_path):
    model = mixnorm.distill(trained(mixnorm.convert(new_model())))
    save_pretrained(model, tmp_path)
    assert_equal(model, from_pretrained(ResNetForImageClassification, tmp_path))


def test_what_is_recorded_goes_through_transformers_own_save(tmp_path):
    """As Trainer calls it, in parts and with a state dict of its own."""
    model = trained(record(mixnorm.convert(new_model())))
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = from_pretrained(ResNetForImageClassification, tmp_path, output_loading_info=True)
    assert_equal(model, loaded)
    assert not info["missing_keys"]
    loaded.save_pretrained(tmp_path / "again")  # what was loaded is recorded
    assert_equal(model, from_pretrained(ResNetForImageClassification, tmp_path / "again"))


def test_other_classes(tmp_path):
    """An auto class is the one that was saved; the model without its head, and one with a new head, have the same norms."""
    model = trained(mixnorm.convert(new_model()))
    save_pretrained(model, tmp_path / "head")
    assert type(from_pretrained(AutoModelForImageClassification, tmp_path / "head")) is ResNetForImageClassification
    base = from_pretrained(ResNetModel, tmp_path / "head")
    assert torch.equal(base(X).pooler_output, model.resnet(X).pooler_output)
    save_pretrained(base, tmp_path / "base")
    assert type(from_pretrained(AutoModel, tmp_path / "base")) is ResNetModel
    headed = from_pretrained(ResNetForImageClassification, tmp_path / "base", num_labels=7)
    assert torch.equal(headed.resnet(X).pooler_output, base(X).pooler_output)
    assert headed(X).logits.shape == (16, 7)


def test_plain_and_reverted_models_load_as_usual(tmp_path):
    model = trained(new_model())
    save_pretrained(model, tmp_path / "plain")
    assert torch.equal(from_pretrained(ResNetForImageClassification, tmp_path / "plain")(X).logits, model(X).logits)
    mixnorm.revert(record(mixnorm.convert(model)))
    save_pretrained(model, tmp_path / "reverted")
    assert "mixture_norms" not in json.loads((tmp_path / "reverted" / "config.json").read_text())
    loaded = ResNetForImageClassification.from_pretrained(tmp_path / "reverted")
    assert torch.equal(loaded(X).logits, model(X).logits)


def test_a_configuration_and_weights_that_do_not_fit_say_what_to_do(tmp_path):
    model = trained(mixnorm.convert(new_model(), inference="pooled"))
    model.save_pretrained(tmp_path / "plain save")
    with pytest.raises(ValueError, match=r"its config.json does not say with which options: save it again with mixnorm"):
        from_pretrained(ResNetForImageClassification, tmp_path / "plain save")
    record(mixnorm.convert(other := new_model(), inference="pooled"))
    trained(other).save_pretrained(tmp_path / "before")
    with pytest.raises(ValueError, match=r"history_samples, which its config.json was recorded before: save it again"):
        from_pretrained(ResNetForImageClassification, tmp_path / "before")
    mixnorm.revert(record(model)).save_pretrained(tmp_path / "stale")
    with pytest.raises(ValueError, match=r"has no weights for resnet.*though its config.json has a mixture norm there"):
        from_pretrained(ResNetForImageClassification, tmp_path / "stale")


def test_what_is_no_model_of_transformers_says_so():
    with pytest.raises(ValueError, match="a Sequential is no model of transformers"):
        record(nn.Sequential(mixnorm.MixtureNorm2d(3)))


def test_a_description_builds_any_model():
    """Shared modules stay shared, and a layer may be the whole model."""
    norm = mixnorm.MixtureNorm1d(4, num_components=2, affine=False)
    model = nn.ModuleDict({"one": norm, "two": nn.Sequential(norm), "last": mixnorm.MixtureNorm1d(4, bias=False)})
    shared = nn.BatchNorm1d(4)
    fresh = nn.ModuleDict({"one": shared, "two": nn.Sequential(shared), "last": nn.BatchNorm1d(4)})
    described = json.loads(json.dumps(describe(model)))
    rebuild(fresh, described).load_state_dict(model.state_dict())
    assert fresh["one"] is fresh["two"][0]
    assert fresh["last"].bias is None
    assert describe(fresh) == described
    assert isinstance(rebuild(nn.BatchNorm1d(4), describe(norm)), mixnorm.MixtureNorm1d)
    assert describe(nn.Linear(2, 2)) == {"shared": {}, "layers": {}}


def test_a_description_that_does_not_fit_says_so():
    class Own(mixnorm.MixtureNorm2d):
        pass

    described = describe(nn.Sequential(mixnorm.MixtureNorm2d(4)))
    with pytest.raises(ValueError, match="a ReLU has no module '0'"):
        rebuild(nn.ReLU(), described)
    with pytest.raises(ValueError, match="is a Own, a class of your own"):
        describe(Own(4))
    for wrong in ({"class": "Linear"}, {"from_the_future": 1}):
        newer = copy.deepcopy(described)
        newer["shared"] |= wrong
        with pytest.raises(ValueError, match="that this version does not know: update mixnorm"):
            rebuild(nn.Sequential(nn.BatchNorm2d(4)), newer)


@pytest.mark.slow
def test_checkpoints_of_transformers_own_trainer(tmp_path):
    """It saves by itself, and takes the best checkpoint back at the end."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = record(mixnorm.convert(new_model(), num_components=2, within="learned"))
    rows = [{"pixel_values": image, "labels": number % 4} for number, image in enumerate(X)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, save_strategy="epoch",
        eval_strategy="epoch", load_best_model_at_end=True, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    best = from_pretrained(ResNetForImageClassification, trainer.state.best_model_checkpoint)
    assert_equal(model.eval(), best)
    assert best.resnet.embedder.embedder.normalization.num_batches_tracked in (2, 4)
