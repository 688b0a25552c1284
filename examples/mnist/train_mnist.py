"""Train a multi-layer perceptron on hand-written digits, on several processes.

    mpiexec -n 2 python train_mnist.py

The digits are those of MNIST if Chainer has them in its cache or ``--data`` names a file with them; otherwise, they are
the 1,797 digits in scikit-learn.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer import training
from chainer.training import extensions
from digits import get_digits


class MLP(chainer.Chain):
    """Three layers; the first one adapts to the number of pixels."""

    def __init__(self, n_units, n_out):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, n_out)

    def forward(self, x):
        """Return the scores of each class for each image."""
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="images in each process's mini-batch")
    parser.add_argument("--communicator", "-x", default="hierarchical", help="how gradients are averaged")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log, the plots and the snapshots")
    parser.add_argument("--resume", "-r", default="", help="the snapshot to resume from")
    parser.add_argument("--unit", "-u", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--data", default="", help="an .npz file with x_train, y_train, x_test and y_test")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    model = L.Classifier(MLP(args.unit, 10))
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)

    # One process reads the data; each process gets its part.
    train, test = get_digits(args.data) if comm.rank == 0 else (None, None)
    if comm.rank == 0:
        print(f"{comm.size} processes, communicator {args.communicator}, {len(train)} images to learn from")
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, comm)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))

    # Extensions that only one process needs.
    if comm.rank == 0:
        trainer.extend(extensions.snapshot(), trigger=(args.epoch, "epoch"))
        trainer.extend(extensions.LogReport())
        losses, accuracies = (["main/" + name, "validation/main/" + name] for name in ("loss", "accuracy"))
        trainer.extend(extensions.PrintReport(["epoch", *losses, *accuracies, "elapsed_time"]))
        trainer.extend(extensions.PlotReport(losses, "epoch", filename="loss.png"))
        trainer.extend(extensions.PlotReport(accuracies, "epoch", filename="accuracy.png"))

    if args.resume:
        chainer.serializers.load_npz(args.resume, trainer)
    trainer.run()

    if comm.rank == 0:
        print(f"validation accuracy: {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
