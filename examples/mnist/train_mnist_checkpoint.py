"""Train a multi-layer perceptron on hand-written digits, on several processes, and resume it after it was killed.

    mpiexec -n 2 python train_mnist_checkpoint.py --run-id first

Kill it, and start it again with the same ``--run-id``: it continues from the newest checkpoint that all processes have.
When it ends normally, the checkpoints are removed.

The digits are those of MNIST if Chainer has them in its cache or ``--data`` names a file that holds them, and otherwise
the 1,797 that come with scikit-learn.
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
    """Three layers; the first adapts itself to the number of pixels."""

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
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the plot")
    parser.add_argument("--run-id", "-i", default="train-mnist", help="the name of the run, and of its checkpoints")
    parser.add_argument("--interval", type=int, default=25, help="iterations between checkpoints")
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

    # One process reads the data; each gets its part.
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

    # What one process can do for all of them.
    losses, accuracies = (["main/" + name, "validation/main/" + name] for name in ("loss", "accuracy"))
    report = extensions.PrintReport(["epoch", *losses, *accuracies, "elapsed_time"])
    plot = extensions.PlotReport(losses, "epoch", filename="loss.png")
    for extension in (extensions.LogReport(), report, plot):
        trainer.extend(chainermn.extensions.main_rank_only(extension, comm))

    # After all other extensions, whose state is part of the checkpoint.
    checkpointer = chainermn.create_multi_node_checkpointer(name=args.run_id, comm=comm)
    trainer.extend(checkpointer, trigger=(args.interval, "iteration"))
    checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0:
        print(f"starts from iteration {trainer.updater.iteration}", flush=True)
    trainer.run()

    if comm.rank == 0:
        print(f"validation accuracy: {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
