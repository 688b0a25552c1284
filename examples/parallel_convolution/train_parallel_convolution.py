"""Train a VGG whose channels are shared out among processes, on hand-written digits.

    mpiexec -n 2 python train_parallel_convolution.py

Every process sees the same mini-batch and computes its part of each layer's channels; the parts are then gathered by
all. So a network may be larger than one device, and no gradient needs to be averaged: each parameter is on one process.
"""

import argparse
import os
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../mnist"))
from digits import get_digits


def part_of(channels, comm):
    """Return how many of the channels this process has."""
    return (comm.rank + 1) * channels // comm.size - comm.rank * channels // comm.size


class ParallelBlock(chainer.Chain):
    """Convolution, batch normalisation and activation of this process's channels; returns those of all."""

    def __init__(self, comm, n_in, n_out):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.conv = L.Convolution2D(n_in, part_of(n_out, comm), 3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(part_of(n_out, comm))

    def forward(self, x):
        """Take all input channels, return all output channels."""
        h = F.relu(self.bn(self.conv(x)))
        return F.concat(chainermn.functions.allgather(self.comm, h), axis=1)


class ParallelLinear(chainer.Chain):
    """A dense layer of which this process computes some outputs; returns those of all."""

    def __init__(self, comm, n_in, n_out):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.layer = L.Linear(n_in, part_of(n_out, comm))

    def forward(self, x):
        """Take all inputs, return all outputs."""
        return F.concat(chainermn.functions.allgather(self.comm, self.layer(x)), axis=1)


class VGG(chainer.Chain):
    """Blocks of two convolutions and a pooling, then two dense layers."""

    def __init__(self, comm, n_in, channels, n_units, n_out):
        super().__init__()
        with self.init_scope():
            self.blocks = chainer.ChainList()
            self.dense = ParallelLinear(comm, None, n_units)
            self.scores = ParallelLinear(comm, n_units, n_out)
        for n_channels in channels:
            self.blocks.append(ParallelBlock(comm, n_in, n_channels))
            self.blocks.append(ParallelBlock(comm, n_channels, n_channels))
            n_in = n_channels

    def forward(self, x):
        """Return the scores of each class for each image."""
        h = x
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            h = F.max_pooling_2d(second(first(h)), 2)
        return self.scores(F.relu(self.dense(h)))


class SharedClassifier(L.Classifier):
    """Every process computes the whole loss; so that their sum is the loss, each counts its share of it."""

    def __init__(self, comm, predictor):
        super().__init__(predictor)
        self.comm = comm

    def forward(self, *args, **kwargs):
        """Report the loss and the accuracy, and return this process's share of the loss."""
        return super().forward(*args, **kwargs) / self.comm.size


def as_images(dataset):
    """Return a dataset of vectors of pixels as one of square images."""
    pixels, labels = (np.array(column) for column in zip(*dataset, strict=True))
    side = round(pixels.shape[1] ** 0.5)
    return chainer.datasets.TupleDataset(pixels.reshape(-1, 1, side, side), labels)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=50, help="images in each mini-batch")
    parser.add_argument("--channels", "-c", type=int, nargs="+", default=[16, 32, 64], help="channels of each block")
    parser.add_argument("--epoch", "-e", type=int, default=10, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the plot")
    parser.add_argument("--unit", "-u", type=int, default=128, help="units in the dense layer")
    parser.add_argument("--data", default="", help="an .npz file with x_train, y_train, x_test and y_test")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator("naive")
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()
    model = SharedClassifier(comm, VGG(comm, 1, args.channels, args.unit, 10))
    model.to_device(device)
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    train, test = map(as_images, get_digits(args.data))
    # The same order on every process.
    sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(0))
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize, order_sampler=sampler)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=device))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        losses, accuracies = (["main/" + name, "validation/main/" + name] for name in ("loss", "accuracy"))
        trainer.extend(extensions.PrintReport(["epoch", *losses, *accuracies]))
        trainer.extend(extensions.PlotReport(losses, "epoch", filename="loss.png"))
    trainer.run()
    if comm.rank == 0:
        print(f"validation accuracy: {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
