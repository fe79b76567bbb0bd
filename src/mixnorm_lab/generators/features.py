"""The networks whose features a Fréchet distance is of: a classifier that this package trained, or the 2015 Inception."""

from __future__ import annotations

import hashlib
import io
import pickle
import urllib.error
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixnorm_lab.config.catalog import FEATURE_CLASSIFIER
from mixnorm_lab.config.parts.gan import FEATURES
from mixnorm_lab.data.dataset import DataSet, channel_statistics, validation_split
from mixnorm_lab.data.download import cache_folder
from mixnorm_lab.generators.frechet import Accumulator, Statistics
from mixnorm_lab.storage import checkpoint, records
from mixnorm_lab.training import build

INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_CHECKSUM = "6726825d"  # what the sha256 of the file begins with
INCEPTION_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION_FILE}"
INCEPTION_SIZE = 2048
TRAIN_ONE = f"mixnorm reproduce {FEATURE_CLASSIFIER} trains one"
GET_INCEPTION = f"get {INCEPTION_FILE} from the releases of github.com/toshas/torch-fidelity"  # or --features fid does


@dataclass(frozen=True)
class Features:
    """A network that makes features of images, with what tells it from others.

    Args:
        name: one of ``config.FEATURES``.
        digest: of the weights. Distances of other weights cannot be compared.
        dimensions: D.
        network: images (N, 3, H, W) in uint8 to their features (N, D).
    """

    name: str
    digest: str
    dimensions: int
    network: Callable[[Tensor], Tensor]

    @property
    def label(self) -> str:
        """What stands beside every distance: "cifar-features 1a2b3c4d"."""
        return f"{self.name} {self.digest[:8]}"

    def statistics(self, batches: Iterable[Tensor]) -> Statistics:
        """Of images in uint8."""
        seen = Accumulator(self.dimensions)
        with torch.no_grad():
            for images in batches:
                seen.add(self.network(images))
        return seen.statistics()


def load(name: str, where: Path | None, dataset: DataSet, device: torch.device) -> Features:
    """The feature network of that name, one of ``config.FEATURES``.

    Args:
        where: the folder of the classifier's run, or the file with the Inception's weights.
        dataset: what the generator is trained on, and the classifier must have been.
    """
    where = given(name, where)
    return of_classifier(where, dataset, device) if name == "cifar-features" else of_inception(where, device)


def given(name: str, where: Path | None) -> Path:
    """Raises unless there is a place to read the feature network from."""
    if where is None:
        remedy = f"--features names the folder of a run; {TRAIN_ONE}"
        if name != "cifar-features":
            remedy = f"{GET_INCEPTION}, and name it with --features"
        raise ValueError(f"the {FEATURES[name]} needs the weights of its feature network: {remedy}")
    return where


def of_classifier(folder: Path, dataset: DataSet, device: torch.device) -> Features:
    """What goes into the last linear layer of a classifier, from the folder of its run."""
    if not (folder / records.NAME).is_file():
        raise ValueError(f"there is no run in {folder}, whose features the distance is of: {TRAIN_ONE}")
    record = records.read(folder / records.NAME)
    config = record.config
    if config.gan is not None or config.data != dataset.name:
        what = "a generator" if config.gan is not None else f"a classifier of {config.data}"
        raise ValueError(f"{folder} holds {what}, but features come from a classifier of {dataset.name}: {TRAIN_ONE}")
    state = checkpoint.read(folder) if record.finished else None
    if state is None:
        raise ValueError(f"the classifier in {folder} is not trained to its end, or its checkpoint is gone: {TRAIN_ONE}")
    model = build.make_model(config, dataset.num_classes, tuple(dataset.train.images.shape[1:]))
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {folder} are of another shape than those of {config.model}: {TRAIN_ONE} "
            f"({' '.join(str(error).split())})"
        ) from error
    if config.validation:
        dataset = validation_split(dataset, config.validation)
    means, deviations = (values.float()[:, None, None].to(device) for values in channel_statistics(dataset.train.images))
    network = _Penultimate(model.to(device).eval())

    def features(images: Tensor) -> Tensor:
        return network((images.to(device).float() - means) / deviations.clamp_min(1e-3))

    return Features("cifar-features", _digest(state["model"]), network.dimensions, features)


class _Penultimate:
    """Images to the inputs of a classifier's last linear layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError("the classifier has no linear layer whose inputs could be its features: use cifar-cnn")
        self.dimensions = linear[-1].in_features
        self.seen: list[Tensor] = []
        linear[-1].register_forward_pre_hook(lambda _, arguments: self.seen.append(arguments[0]))

    def __call__(self, images: Tensor) -> Tensor:
        self.model(images)
        return self.seen.pop()


def _digest(state: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(value.contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def fetch_inception() -> Path:
    """The file with the 2015 Inception's weights, downloaded into the cache unless it is there, and checked."""
    path = cache_folder() / INCEPTION_FILE
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(INCEPTION_URL, str(path), hash_prefix=INCEPTION_CHECKSUM)
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            remedy = f"{GET_INCEPTION} on another machine, and name it with --features"
            raise OSError(f"{INCEPTION_URL} cannot be reached ({reason}): {remedy}") from error
        except RuntimeError as error:  # another checksum; nothing is left of it
            raise ValueError(f"{INCEPTION_URL} gave another file than it should: {GET_INCEPTION} by hand") from error
    return path


def of_inception(path: Path, device: torch.device) -> Features:
    """The 2,048 pooled features of the 2015 Inception, by torch-fidelity, whose distance is FID."""
    if not path.is_file():
        raise ValueError(f"there is no file {path} with the Inception's weights: {GET_INCEPTION}")
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import (  # type: ignore[import-not-found]
            FeatureExtractorInceptionV3,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"FID needs the package {error.name}: install the extra, pip install '.[fid]' from a checkout of mixnorm"
        ) from error
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if not digest.startswith(INCEPTION_CHECKSUM):
        raise ValueError(f"{path} does not hold the 2015 Inception's weights (its checksum is another): {GET_INCEPTION}")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors, and is not loaded: {GET_INCEPTION}") from error
    # The library would load any pickle: it gets a file with nothing but the tensors.
    checked = io.BytesIO()
    torch.save(state, checked)
    checked.seek(0)
    network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=checked)
    network = network.to(device).eval()
    return Features("inception-2015", digest, INCEPTION_SIZE, lambda images: network(images.to(device))[0])
