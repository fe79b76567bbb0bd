"""Lightning, Accelerate and timm: their loops train the layers as a loop by hand does. Slow, because they import so much."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import assert_same, points
from torch import nn

import mixnorm
from mixnorm import MixtureNorm2d
from mixnorm_lab.models import DigitsCNN

pytestmark = pytest.mark.slow

BATCHES = [(points(16, 1, 8, 8, seed=seed), torch.arange(16) % 10) for seed in range(4)]
EPOCHS, ACCUMULATED = 2, 2


def new_model():
    torch.manual_seed(0)
    return mixnorm.convert(DigitsCNN(), num_components=2, history=3)


def loss_of(model, batch, number):
    """The number of the batch decides the random numbers, so that a framework that draws some changes nothing."""
    x, labels = batch
    torch.manual_seed(number)
    return F.cross_entropy(model(x), labels)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_by_hand():
    model = new_model()
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for number, batch in enumerate(BATCHES):
            (loss_of(model, batch, number) / ACCUMULATED).backward()
            if (number + 1) % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def loader():
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def lightning_module(lightning):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = new_model()

        def training_step(self, batch, number):
            return loss_of(self.model, batch, number)

        def configure_optimizers(self):
            return optimizer_of(self.model)

    return Module()


def lightning_trainer(lightning, folder, **options):
    return lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_as_a_loop_by_hand(tmp_path):
    lightning = pytest.importorskip("lightning")
    module = lightning_module(lightning)
    trainer = lightning_trainer(lightning, tmp_path, accumulate_grad_batches=ACCUMULATED)
    trainer.fit(module, loader())
    assert_same(module.model.state_dict(), trained_by_hand().state_dict())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    other = lightning_module(lightning)
    other.load_state_dict(saved)
    assert_same(other.model.state_dict(), module.model.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_in_mixed_precision(precision, tmp_path):
    lightning = pytest.importorskip("lightning")
    module = lightning_module(lightning)
    before = copy.deepcopy(module.model.state_dict())
    lightning_trainer(lightning, tmp_path, precision=precision, enable_checkpointing=False).fit(module, loader())
    after = module.model.state_dict()
    assert all(t.isfinite().all() for t in after.values())
    assert after["conv2.norm.num_batches_tracked"] == EPOCHS * len(BATCHES)
    assert after["conv2.norm.history_means"].dtype == torch.float32
    assert not torch.equal(after["conv1.conv.weight"], before["conv1.conv.weight"])


def test_accelerate_trains_as_a_loop_by_hand():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model = new_model()
    model, optimizer, batches = accelerator.prepare(model, optimizer_of(model), loader())
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch, number))
                optimizer.step()
                optimizer.zero_grad()
    assert_same(accelerator.unwrap_model(model).state_dict(), trained_by_hand().state_dict())


def test_a_state_dict_goes_through_safetensors():
    """What Accelerate and the hub save: tensors that share no memory."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = trained_by_hand(), new_model()
    other.load_state_dict(safetensors.load(safetensors.save(model.state_dict())))
    assert_same(other.state_dict(), model.state_dict())


@pytest.fixture
def timm():
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision raises this beside another build of torch
        pytest.skip(f"timm cannot be imported: {error}")
    return timm


@pytest.mark.parametrize("norm_layer", [MixtureNorm2d, functools.partial(MixtureNorm2d, num_components=2)])
def test_timm_norm_layer(timm, norm_layer):
    model = timm.create_model("resnet10t", norm_layer=norm_layer, num_classes=3)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    x = points(4, 3, 32, 32)
    F.cross_entropy(model(x), torch.arange(4) % 3).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.bn1.num_batches_tracked == 1
    pretrained = timm.create_model("resnet10t", num_classes=3).eval()
    model.load_state_dict(pretrained.state_dict())
    torch.testing.assert_close(model.eval()(x), pretrained(x), atol=1e-4, rtol=1e-4)


def test_timm_norm_layer_with_its_activation(timm):
    """The models whose norms have the activation inside take a function that makes both."""

    def norm_act(channels, apply_act=True, **_):
        return nn.Sequential(MixtureNorm2d(channels), nn.SiLU() if apply_act else nn.Identity())

    model = timm.create_model("efficientnet_b0", norm_layer=norm_act, num_classes=3)
    assert sum(isinstance(module, MixtureNorm2d) for module in model.modules()) == 49
    assert model.eval()(points(2, 3, 32, 32)).isfinite().all()
