"""The models of the paper, one file each, with the norm injected. They stand on torch alone."""

from mixnorm.models.cifar_cnn import CifarCNN
from mixnorm.models.densenet import DenseNet

__all__ = ["CifarCNN", "DenseNet"]
