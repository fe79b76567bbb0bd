"""A callback for Lightning: converts a module's batch norms, refills statistics before evaluations, logs the components."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from mixnorm.convert import convert as convert_norms
from mixnorm.integrations.watch import mixture_norms, numbers
from mixnorm.recalibrate import recalibrate
from mixnorm.select import Select

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "mixnorm.integrations.lightning needs Lightning: pip install lightning", name="lightning"
        ) from None


class MixtureNorms(Callback):
    """Trains a ``LightningModule`` with mixture norms.

    Its batch norms are converted when the trainer sets it up, before the optimizer is made, for ``trainer.test`` and
    ``trainer.validate`` as well: a checkpoint of a converted module loads there. The model is one that ``__init__`` made. A
    module that has mixture norms already keeps them as they are.

    Args:
        select: which batch norms, as :func:`mixnorm.convert` takes it.
        convert: False leaves the module as it is.
        recalibrate: of so many batches are the statistics refilled before each validation and test: the last ones of the
            training, which are kept for it, or those of ``batches``. 0 is never.
        batches: makes batches for that, as :func:`mixnorm.recalibrate` takes them; needed where nothing is trained before.
        log: whether ``components`` in use are logged for each layer at the end of an epoch, with the means of learned gates.
        options: for the mixture norms, such as ``num_components=5``.

    Example:
        >>> Trainer(callbacks=[MixtureNorms("layer3.*", recalibrate=20, num_components=3)]).fit(module, loader)
    """

    def __init__(
        self,
        select: Select = None,
        *,
        convert: bool = True,
        recalibrate: int = 0,
        batches: Callable[[], Iterable[Any]] | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        if recalibrate < 0:
            raise ValueError(f"recalibrate={recalibrate} must be a number of batches, or 0 for never")
        self.select, self.convert, self.options = select, convert, options
        self.recalibrate, self.batches, self.log = recalibrate, batches, log
        self._last: deque[Any] = deque(maxlen=recalibrate)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.convert and not mixture_norms(pl_module):
            convert_norms(pl_module, self.select, **self.options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.recalibrate and self.batches is None:
            self._last.append(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._refill(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._refill(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.log:
            pl_module.log_dict(numbers(pl_module, weights=False))

    def _refill(self, trainer: Any, pl_module: Any) -> None:
        if not self.recalibrate:
            return
        batches = list(self._last) if self.batches is None else self._first(self.batches())
        if not batches:
            raise ValueError(
                "there was no training batch to refill statistics from: give MixtureNorms batches=, a function that makes "
                "some, or recalibrate=0"
            )
        with trainer.precision_plugin.forward_context():
            recalibrate(pl_module, batches)

    def _first(self, batches: Iterable[Any]) -> list[Any]:
        return [batch for _, batch in zip(range(self.recalibrate), batches, strict=False)]
