"""The pictures for the examples: CIFAR if Chainer has it in its cache, otherwise scikit-learn's digits."""

import os

import chainer
import numpy as np


def get_pictures(name="cifar10"):
    """Return datasets of (picture, class) for training and for testing, and the number of classes.

    Args:
        name: ``cifar10`` or ``cifar100``.

    Returns:
        Two TupleDatasets of float32 arrays of shape (3, 32, 32) between 0 and 1, and int32 classes; and a number.
        Nothing is downloaded: without a cached CIFAR these are scikit-learn's 1,797 digits, enlarged four times.
    """
    root = chainer.dataset.get_dataset_root()
    if os.path.exists(os.path.join(root, "pfnet/chainer/cifar", name.replace("cifar", "cifar-") + ".npz")):
        train, test = getattr(chainer.datasets, "get_" + name)()
        return train, test, int(name.removeprefix("cifar"))
    return (*digits(), 10)


def digits():
    """Return scikit-learn's digits as pictures; one in six is for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    grey = np.kron(found.images / 16, np.ones((4, 4))).astype(np.float32)
    pictures = np.repeat(grey[:, None], 3, axis=1)
    labels = found.target.astype(np.int32)
    is_test = np.arange(len(pictures)) % 6 == 5
    return tuple(chainer.datasets.TupleDataset(pictures[part], labels[part]) for part in (~is_test, is_test))
