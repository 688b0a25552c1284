"""Train a convolutional network on small pictures, on several processes.

    mpiexec -n 2 python train_cifar.py

The pictures are those of CIFAR if Chainer has them in its cache, and otherwise scikit-learn's digits.
"""

import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer import training
from chainer.training import extensions
from pictures import get_pictures


class Block(chainer.Chain):
    """A convolution, a batch normalization and a ReLU."""

    def __init__(self, n_out):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(None, n_out, 3, pad=1, nobias=True)
            self.bn = L.BatchNormalization(n_out)

    def forward(self, x):
        """Return maps of the same size."""
        return F.relu(self.bn(self.conv(x)))


class SmallVGG(chainer.Chain):
    """Pairs of blocks, each followed by a pooling that halves the picture's size; then two layers."""

    def __init__(self, n_classes, width):
        super().__init__()
        with self.init_scope():
            self.blocks = chainer.ChainList(*(Block(width * 2 ** (i // 2)) for i in range(6)))
            self.fc = L.Linear(None, 8 * width)
            self.out = L.Linear(None, n_classes)

    def forward(self, x):
        """Return the scores of each class for each picture."""
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2:
                x = F.dropout(F.max_pooling_2d(x, 2), 0.25)
        return self.out(F.dropout(F.relu(self.fc(x))))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", "-d", default="cifar10", choices=["cifar10", "cifar100"])
    parser.add_argument("--batchsize", "-b", type=int, default=64, help="pictures in each process's mini-batch")
    parser.add_argument("--learnrate", "-l", type=float, default=0.05, help="of the first epochs")
    parser.add_argument("--communicator", "-c", "-x", default="hierarchical", help="how gradients are averaged")
    parser.add_argument("--epoch", "-e", type=int, default=30, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log, the plot and the snapshots")
    parser.add_argument("--resume", "-r", action="store_true", help="go on from the newest snapshot in that folder")
    parser.add_argument("--width", type=int, default=32, help="maps of the first layer")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    # The pictures of other processes are not sent; the test parts are disjoint, so that each picture counts once.
    train, test, n_classes = get_pictures(args.dataset) if comm.rank == 0 else (None, None, None)
    n_classes = comm.bcast_obj(n_classes)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)

    model = L.Classifier(SmallVGG(n_classes, args.width))
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(args.learnrate), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(5e-4))

    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)

    # The running means of the batch normalizations differ between processes until they are averaged.
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm, weighted=True))
    trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(max(1, args.epoch // 4), "epoch"))
    losses, accuracies = (["main/" + name, "validation/main/" + name] for name in ("loss", "accuracy"))
    report = extensions.PrintReport(["epoch", *losses, *accuracies, "elapsed_time"])
    plot = extensions.PlotReport(losses, "epoch", filename="loss.png")
    for extension in (extensions.LogReport(), report, plot):
        trainer.extend(chainermn.extensions.main_rank_only(extension, comm))
    snapshot = extensions.snapshot(n_retains=2, autoload=args.resume)
    trainer.extend(chainermn.extensions.multi_node_snapshot(comm, snapshot, [0]), trigger=(1, "epoch"))
    trainer.run()

    if comm.rank == 0:
        print(f"validation accuracy: {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    main()
