"""What the scripts in this folder share: options, scikit-learn's digits, a perceptron, its trainer, and a chart."""

import argparse
import os
import signal

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from sklearn.datasets import load_digits


def parse_options(description, **defaults):
    """Return the options: ``--out``, ``--device``, and one for each keyword argument, which is its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", default=".", help="the folder for pictures")
    parser.add_argument("--device", "-d", default="@numpy", help="@numpy, @cupy (one GPU for each process), @cupy:0 …")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default} by default")
    return parser.parse_args()


def get_device(name, comm):
    """Return a device by Chainer's name for it, and use it; with ``@cupy``, process i of a host takes GPU i."""
    device = chainer.get_device(f"@cupy:{comm.intra_rank}" if name == "@cupy" else name)
    device.use()
    return device


def get_digits():
    """Return images of 64 pixels and what they show: two arrays to train with, and two to test with."""
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def batches(comm, arrays, size, device, steps):
    """Yield a number of mini-batches; in each, every process has its own samples."""
    random = np.random.RandomState(0)  # the same on all processes
    while True:
        order = random.permutation(len(arrays[0]))
        for begin in range(0, len(order) - size * comm.size + 1, size * comm.size):
            if not steps:
                return
            steps -= 1
            mine = order[begin : begin + size * comm.size][comm.rank :: comm.size]
            yield tuple(device.send(array[mine]) for array in arrays)


class Perceptron(chainer.Sequential):
    """Linear layers of given widths."""

    def __init__(self, *widths):
        layers = [L.Linear(before, after) for before, after in zip((64, *widths), (*widths, 10), strict=True)]
        super().__init__(layers[0], *(part for layer in layers[1:] for part in (F.relu, layer)))


def make_trainer(comm, device, steps, out):
    """Return a trainer of the digits; the processes that there are deal the samples among themselves."""
    (images, labels), _ = get_digits()
    data = chainer.datasets.TupleDataset(images, labels)
    iterator = chainermn.iterators.ElasticIterator(data, 60, comm, seed=0, global_batch=True)
    model = make_model(100, device=device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
    updater = chainer.training.StandardUpdater(iterator, optimizer, device=device)
    trainer = chainer.training.Trainer(updater, (steps, "iteration"), out)
    trainer.extend(chainer.training.extensions.LogReport(trigger=(1, "iteration"), filename=None))
    return trainer


def kill(trainer):
    """End this process; an extension of a trainer."""
    os.kill(os.getpid(), signal.SIGKILL)


def make_model(*widths, device, seed=0):
    """Return a classifier of digits on a device."""
    np.random.seed(seed)
    model = L.Classifier(Perceptron(*widths))
    model.to_device(device)
    return model


def accuracy(model, arrays, device):
    """Return the share of images for which the model is right."""
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        model(*map(device.send, arrays))
    return float(model.accuracy.array)


def draw(path, curves, x_label, y_label, **options):
    """Draw curves, given by name as pairs of lists, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in curves.items():
        axes.plot(x, y, label=name)
    axes.set(xlabel=x_label, ylabel=y_label, **options)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=100)
