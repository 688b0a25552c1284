"""The digits for the examples in this folder: MNIST if it is available, otherwise scikit-learn's."""

import os

import chainer
import numpy as np


def get_digits(path=""):
    """Return datasets of (pixels, digit) for training and for testing.

    Args:
        path: An .npz file with x_train, y_train, x_test and y_test; if empty, Chainer's cached MNIST is used if it
            exists, and otherwise scikit-learn's digits. Nothing is downloaded.

    Returns:
        Two TupleDatasets of float32 vectors between 0 and 1, and int32 digits.
    """
    if path:
        return from_npz(path)
    if os.path.exists(cached_mnist()):
        return chainer.datasets.get_mnist()
    return from_scikit_learn()


def cached_mnist():
    """Return the file in which Chainer keeps MNIST after it was downloaded once."""
    return os.path.join(chainer.dataset.get_dataset_root(), "pfnet/chainer/mnist/train.npz")


def from_npz(path):
    """Return the digits in an .npz file, whose pixels are 0 to 255."""
    with np.load(path) as arrays:
        return tuple(
            chainer.datasets.TupleDataset(as_vectors(arrays[f"x_{part}"], 255), arrays[f"y_{part}"].astype(np.int32))
            for part in ("train", "test")
        )


def from_scikit_learn():
    """Return scikit-learn's 1,797 digits of 8 by 8 pixels, one in six of which is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = as_vectors(digits.images, 16)
    labels = digits.target.astype(np.int32)
    is_test = np.arange(len(images)) % 6 == 5
    return tuple(chainer.datasets.TupleDataset(images[part], labels[part]) for part in (~is_test, is_test))


def as_vectors(images, highest):
    """Return images as float32 vectors between 0 and 1."""
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(highest)
