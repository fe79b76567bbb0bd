"""Mixture normalization for PyTorch: layers, model conversion, and the mathematics behind them."""

from mixnorm import fisher, functional, gmm
from mixnorm.convert import convert, revert, synchronize
from mixnorm.distill import distill
from mixnorm.freeze import freeze, unfreeze
from mixnorm.layers import MixtureNorm1d, MixtureNorm2d, MixtureNorm3d
from mixnorm.lazy import LazyMixtureNorm1d, LazyMixtureNorm2d, LazyMixtureNorm3d
from mixnorm.recalibrate import recalibrate

__version__ = "0.2.0"

__all__ = [
    "LazyMixtureNorm1d",
    "LazyMixtureNorm2d",
    "LazyMixtureNorm3d",
    "MixtureNorm1d",
    "MixtureNorm2d",
    "MixtureNorm3d",
    "convert",
    "distill",
    "fisher",
    "freeze",
    "functional",
    "gmm",
    "recalibrate",
    "revert",
    "synchronize",
    "unfreeze",
]
