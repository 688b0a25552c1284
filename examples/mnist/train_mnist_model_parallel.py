"""Train a multi-layer perceptron whose layers live on two processes, on hand-written digits.

    mpiexec -n 2 python train_mnist_model_parallel.py

Process 0 has the images, the first layer and the last one; process 1 has the layer between them.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer import training
from chainer.training import extensions
from digits import get_digits


class Part(chainer.Chain):
    """One layer, with or without an activation."""

    def __init__(self, n_in, n_out, activate=True):
        super().__init__()
        self.activate = activate
        with self.init_scope():
            self.layer = L.Linear(n_in, n_out)

    def forward(self, x):
        """Return the outputs of the layer for each row."""
        h = self.layer(x)
        return F.relu(h) if self.activate else h


class FirstAndLast(chainermn.MultiNodeChainList):
    """What process 0 has: pixels go out to process 1, and what comes back becomes scores."""

    def __init__(self, comm, n_units, n_out, peer=1):
        super().__init__(comm)
        self.add_link(Part(None, n_units), rank_in=None, rank_out=peer)
        self.add_link(Part(n_units, n_out, activate=False), rank_in=peer, rank_out=None)


class Middle(chainermn.MultiNodeChainList):
    """What process 1 has: it answers whatever comes from process 0."""

    def __init__(self, comm, n_units, peer=0):
        super().__init__(comm)
        self.add_link(Part(n_units, n_units), rank_in=peer, rank_out=peer)

    def forward(self, *unused):
        """Return something empty from which the backward pass starts."""
        return super().forward()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="images in each mini-batch")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the plot")
    parser.add_argument("--unit", "-u", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--data", default="", help="an .npz file with x_train, y_train, x_test and y_test")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator("naive")
    if comm.size != 2:
        raise SystemExit(f"expected 2 processes, got {comm.size}")
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    # Process 1 has no images; empty ones keep its iterator in step.
    train, test = get_digits(args.data)
    if comm.rank == 0:
        model = L.Classifier(FirstAndLast(comm, args.unit, 10))
    else:
        model = Middle(comm, args.unit)
        train = chainermn.datasets.create_empty_dataset(train)
        test = chainermn.datasets.create_empty_dataset(test)
    model.to_device(device)
    # Each process optimises the layers that it has; nothing is averaged.
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)

    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
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
