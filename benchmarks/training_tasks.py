"""The tasks of `real_training.py`: digits, pictures, and translating numbers; each small enough for two cores.

Nothing is downloaded: the digits come with scikit-learn, the photographs with scikit-learn and scikit-image, and
num2words spells the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

__all__ = ["TASKS", "Task"]

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
for _folder in ("seq2seq", "imagenet"):
    sys.path.append(str(_EXAMPLES / _folder))


@dataclass(frozen=True)
class Task:
    """A task to learn.

    Args:
        score_name: The name of the score on the test samples, in points from 0 to 100.
        size: The number of training samples.
        batch: The number of samples of a rank's mini-batch.
        optimizer: Creates the optimizer; its argument says whether the compression has the momentum instead.
        clip: The maximum norm of the averaged gradients; longer ones are scaled down to it. 0 for no limit.
        model: Creates the network from a seed.
        loss: Called with the network and the indices of samples.
        score: Called with the network.
    """

    score_name: str
    size: int
    batch: int
    optimizer: Callable[[bool], chainer.Optimizer]
    clip: float
    model: Callable[[int], chainer.Chain]
    loss: Callable[[Any, np.ndarray], chainer.Variable]
    score: Callable[[Any], float]


def digits(units: int) -> Task:
    """Return the task of reading scikit-learn's 1,797 digits, one in six of which is for testing, with a perceptron."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, t = (found.images.reshape(-1, 64) / 16).astype(np.float32), found.target.astype(np.int32)

    def model(seed: int) -> chainer.Chain:
        initial = chainer.initializers.LeCunNormal(rng=np.random.RandomState(seed))
        return chainer.Sequential(
            *(L.Linear(64, units, initialW=initial), F.relu),
            *(L.Linear(units, units, initialW=initial), F.relu),
            L.Linear(units, 10, initialW=initial),
        )

    return _classify(x, t, 32, 0.05, model)


def pictures(side: int = 16) -> Task:
    """Return the task of distinguishing digits and parts of photographs with a small residual network."""
    from make_pictures import samples

    found = [(np.asarray(image), label) for image, label in samples(None, 120, side)]
    x = np.stack([image.transpose(2, 0, 1) for image, _ in found]).astype(np.float32) / 255
    t = np.array([label for _, label in found], np.int32)

    def model(seed: int) -> chainer.Chain:
        return ResNet(int(t.max()) + 1, np.random.RandomState(seed))

    return _classify(x, t, 16, 0.05, model)


def translation() -> Task:
    """Return the task of translating English numbers to French, as in examples/seq2seq; the score is BLEU."""
    from bleu import bleu
    from corpus import get_corpus
    from seq2seq import Seq2Seq

    source, target, train, test = get_corpus(6000)

    def model(seed: int) -> chainer.Chain:
        np.random.seed(seed)
        return Seq2Seq(1, len(source), len(target), 64)

    def loss(network: Any, chosen: np.ndarray) -> chainer.Variable:
        sources, targets = zip(*(train[i] for i in chosen), strict=True)
        return network(list(sources), list(targets))

    def score(network: Any) -> float:
        translations = network.translate([sentence for sentence, _ in test])
        references = [target.decode(sentence) for _, sentence in test]
        return 100 * float(bleu(references, [target.decode(each) for each in translations]))

    def optimizer(has_momentum_elsewhere: bool) -> chainer.Optimizer:
        return chainer.optimizers.SGD(0.1) if has_momentum_elsewhere else chainer.optimizers.MomentumSGD(0.1)

    return Task("BLEU", len(train), 16, optimizer, 2.0, model, loss, score)


class ResNet(chainer.Chain):
    """Three residual blocks with batch normalisation, 8 to 32 channels (He et al., 2015, arXiv 1512.03385).

    Args:
        n_classes: The number of classes.
        random: For the initial weights.
    """

    def __init__(self, n_classes: int, random: np.random.RandomState) -> None:
        super().__init__()
        initial = chainer.initializers.HeNormal(rng=random)
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1, nobias=True, initialW=initial)
            self.norm = L.BatchNormalization(8)
            self.blocks = chainer.ChainList(
                *(Block(n, m, stride, initial) for n, m, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2)))
            )
            self.last = L.Linear(32, n_classes, initialW=chainer.initializers.LeCunNormal(rng=random))

    def forward(self, x: np.ndarray) -> chainer.Variable:
        """Return the scores of the classes."""
        h = F.relu(self.norm(self.first(x)))
        for block in self.blocks:
            h = block(h)
        return self.last(F.average(h, axis=(2, 3)))


class Block(chainer.Chain):
    """Two convolutions with a shortcut from input to output."""

    def __init__(self, n: int, m: int, stride: int, initial: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.one = L.Convolution2D(n, m, 3, stride, 1, nobias=True, initialW=initial)
            self.two = L.Convolution2D(m, m, 3, 1, 1, nobias=True, initialW=initial)
            self.norms = chainer.ChainList(L.BatchNormalization(m), L.BatchNormalization(m))
            if n != m:
                self.beside = L.Convolution2D(n, m, 1, stride, nobias=True, initialW=initial)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        """Return the sum of both branches."""
        h = self.norms[1](self.two(F.relu(self.norms[0](self.one(x)))))
        return F.relu(h + (self.beside(x) if hasattr(self, "beside") else x))


def _classify(x: np.ndarray, t: np.ndarray, batch: int, lr: float, model: Callable[[int], chainer.Chain]) -> Task:
    is_test = np.arange(len(x)) % 6 == 5
    train, test = (x[~is_test], t[~is_test]), (x[is_test], t[is_test])

    def loss(network: Any, chosen: np.ndarray) -> chainer.Variable:
        return F.softmax_cross_entropy(network(train[0][chosen]), train[1][chosen])

    def score(network: Any) -> float:
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            return 100 * float(F.accuracy(network(test[0]), test[1]).array)

    def optimizer(has_momentum_elsewhere: bool) -> chainer.Optimizer:
        return chainer.optimizers.SGD(lr) if has_momentum_elsewhere else chainer.optimizers.MomentumSGD(lr)

    return Task("accuracy, %", len(train[0]), batch, optimizer, 0.0, model, loss, score)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: digits(300),
    "digits-large": lambda: digits(1000),
    "pictures": pictures,
    "translation": translation,
}
