"""The callback for Lightning. Slow, because Lightning imports so much. Without it, a sentence says what to install."""

import subprocess
import sys

import pytest
import torch
from layer_helpers import points
from torch import nn

import mixnorm

BATCHES = [(points(32, 6, seed=seed), torch.arange(32) % 2) for seed in range(4)]


def test_without_lightning_one_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules.update({'lightning.pytorch': None, 'lightning': None, 'pytorch_lightning': None})\n"
        "try: import mixnorm.integrations.lightning\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mixnorm.integrations.lightning needs Lightning: pip install lightning\n"


def module_class(lightning):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
            )

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.log("seen", self(batch[0]).square().mean())

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


def trainer(lightning, folder, *callbacks, **options):
    return lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=list(callbacks), **options,
    )  # fmt: skip


def loader():
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_callback_converts_logs_and_refills(tmp_path):
    lightning = pytest.importorskip("lightning")
    from mixnorm.integrations.lightning import MixtureNorms

    module = module_class(lightning)()
    callback = MixtureNorms("model.1", recalibrate=3, num_components=2, within="learned")
    training = trainer(lightning, tmp_path, callback)
    training.fit(module, loader(), loader())
    assert isinstance(module.model[1], mixnorm.MixtureNorm1d)
    assert isinstance(module.model[3], nn.BatchNorm1d)
    assert module.model[1].within_weight.abs().sum() > 0  # the optimizer has what was converted
    logged = training.callback_metrics
    assert 1 <= logged["mixture_norm/model.1/components"] <= 2
    assert "mixture_norm/model.1/within" in logged
    assert "mixture_norm/model.1/weight_1" not in logged
    assert module.model[1].num_batches_tracked == 3  # refilled before the last validation, from the last three batches
    assert module.model[1].num_components == 2

    # Again from the checkpoint, in a module that was not converted yet.
    training.save_checkpoint(tmp_path / "last.ckpt")
    again = module_class(lightning)()
    testing = trainer(lightning, tmp_path, MixtureNorms("model.1", num_components=2, within="learned"))
    testing.test(again, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False)
    assert torch.equal(again.eval()(BATCHES[0][0]), module.eval()(BATCHES[0][0]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_statistics_are_refilled_from_batches_of_the_users(tmp_path):
    lightning = pytest.importorskip("lightning")
    from mixnorm.integrations.lightning import MixtureNorms

    module = mixnorm.convert(module_class(lightning)())
    before = module.model[1]
    with pytest.raises(ValueError, match="give MixtureNorms batches=, a function that makes some"):
        trainer(lightning, tmp_path, MixtureNorms(recalibrate=2)).test(module, loader(), verbose=False)
    callback = MixtureNorms(recalibrate=2, batches=loader, log=False)
    trainer(lightning, tmp_path, callback, precision="bf16-mixed").test(module, loader(), verbose=False)
    assert module.model[1] is before  # it was converted already
    assert before.num_batches_tracked == 2


@pytest.mark.slow
def test_a_number_of_batches_below_none_says_so():
    pytest.importorskip("lightning")
    from mixnorm.integrations.lightning import MixtureNorms

    with pytest.raises(ValueError, match="recalibrate=-1 must be a number of batches, or 0 for never"):
        MixtureNorms(recalibrate=-1)
