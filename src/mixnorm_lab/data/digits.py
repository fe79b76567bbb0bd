"""scikit-learn's digits: 1,797 real images of 8×8 that come with the package, so that a first run needs no network."""

from __future__ import annotations

import torch

from mixnorm_lab.data.dataset import DataSet, Images, stratified_split

# The values are 0 to 16. A whole factor keeps their ratios exact, and standardization then takes it out again.
FACTOR = 15


def read() -> DataSet:
    """The digits with a fixed fifth of each class as test images."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ValueError("The data set digits needs scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    images = torch.from_numpy(digits.images * FACTOR).to(torch.uint8).unsqueeze(1)
    train, test = stratified_split(Images(images, torch.from_numpy(digits.target).long()), fraction=0.2, seed=0)
    return DataSet("digits", train, test, num_classes=10, augment=False)
