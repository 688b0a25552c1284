"""Train a convolutional network on pictures in JPEG files, on several processes.

    python make_pictures.py pictures
    python compute_mean.py pictures/train.txt --root pictures
    mpiexec -n 2 python train_imagenet.py pictures/train.txt pictures/val.txt --root pictures --arch tiny --classes 20

Each line of the lists contains a path and a class. Only the lists are sent; each process reads the files of its part,
with its own worker processes.

With --recipe large, it trains like the training of ResNet-50 on ImageNet in 15 minutes on 1,024 GPUs with 32 pictures
each (Akiba, Suzuki and Fukuda, 2017, arXiv 1711.04325), with its epochs in proportion if there are not 90: RMSprop that
becomes momentum SGD, a learning rate that starts slowly, and batch normalisation with the last statistics. If a
process's pictures do not fit into its memory, --micro-batches divides each mini-batch into parts.
"""

import argparse
import multiprocessing

import chainer
import chainermn
import models
import numpy as np
from chainer import training
from chainer.training import extensions
from chainermn import optimizers


class Preprocessed(chainer.dataset.DatasetMixin):
    """Pictures less their mean, cut to size: to learn from at random and mirrored half the time, else in the middle."""

    def __init__(self, path, root, mean, size, is_random):
        self.base = chainer.datasets.LabeledImageDataset(path, root)
        self.mean = mean
        self.size = size
        self.is_random = is_random

    def __len__(self):
        return len(self.base)

    def get_example(self, i):
        """Return a picture as float32 of shape (3, size, size), and its class."""
        picture, label = self.base[i]
        spare = [length - self.size for length in picture.shape[1:]]
        top, left = (np.random.randint(n + 1) if self.is_random else n // 2 for n in spare)
        window = (slice(None), slice(top, top + self.size), slice(left, left + self.size))
        picture = (picture - self.mean)[window] / np.float32(255)
        return picture[:, :, ::-1] if self.is_random and np.random.rand() < 0.5 else picture, label


class TestModeEvaluator(extensions.Evaluator):
    """An evaluator of your own: it turns off everything that is only for training, and reports the error as well."""

    def evaluate(self):
        """Return the means over this process's pictures."""
        with chainer.using_config("train", False):
            found = super().evaluate()
        return {**found, "validation/main/error": 1 - found["validation/main/accuracy"]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="the list of pictures to learn from")
    parser.add_argument("val", help="the list of pictures to validate with")
    parser.add_argument("--arch", "-a", choices=sorted(models.ARCHITECTURES), default="nin", help="the network")
    parser.add_argument("--batchsize", "-B", type=int, default=32, help="pictures in each process's mini-batch")
    parser.add_argument("--classes", type=int, default=1000, help="how many classes there are")
    parser.add_argument("--communicator", default="hierarchical", help="how gradients are averaged")
    parser.add_argument("--epoch", "-E", type=int, default=10, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--initmodel", default="", help="the file of a model to start from")
    parser.add_argument("--learnrate", type=float, default=0.01, help="of the recipe plain")
    parser.add_argument("--loaderjob", "-j", type=int, default=2, help="worker processes that read files, for each one")
    parser.add_argument("--mean", "-m", default="mean.npy", help="the mean, from compute_mean.py")
    parser.add_argument("--micro-batches", type=int, default=1, help="in how many parts to compute each mini-batch")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log, the plot and the checkpoints")
    parser.add_argument("--recipe", choices=("plain", "large"), default="plain", help="large is for large mini-batches")
    parser.add_argument("--resume", "-r", default="", help="the snapshot to resume from")
    parser.add_argument("--root", "-R", default=".", help="the folder that the paths start from")
    parser.add_argument("--val_batchsize", "-b", type=int, default=100, help="pictures in a mini-batch for validation")
    parser.add_argument("--test", action="store_true", help="a few iterations, to see that it works")
    return parser.parse_args()


def use_large_batches(trainer, model, comm, batch_size, n_epochs):
    """Set up a trainer whose optimizer is RMSpropWarmup with all methods of the paper.

    Args:
        trainer: The trainer.
        model: The model.
        comm: The ranks, which average the statistics of batch normalisations before an evaluation, anyway.
        batch_size: The pictures in each process's mini-batch.
        n_epochs: The length of the training; the paper's schedule is for 90 epochs.
    """
    optimizers.keep_last_statistics(model)
    for name, param in model.namedparams():
        if name.endswith("/W"):  # neither biases nor the factors of batch normalisation
            param.update_rule.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    base = optimizers.linear_scaling(0.1, batch_size * comm.size)
    steps = [(epoch * n_epochs / 90, factor) for epoch, factor in optimizers.SLOW_START]
    trainer.extend(chainermn.extensions.LearningRateSchedule(optimizers.piecewise(base, steps)))
    passage = chainermn.extensions.RMSpropWarmupSchedule(center=10 * n_epochs / 90, period=5 * n_epochs / 90)
    trainer.extend(passage)


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    model = models.ARCHITECTURES[args.arch](args.classes)
    if args.initmodel:
        chainer.serializers.load_npz(args.initmodel, model)
    model.to_device(device)

    # The datasets contain paths: they are sent as a whole, as objects of a few kilobytes, and rank 0 reads no pictures.
    train = val = None
    if comm.rank == 0:
        mean = np.load(args.mean)
        train = Preprocessed(args.train, args.root, mean, model.insize, True)
        val = Preprocessed(args.val, args.root, mean, model.insize, False)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)
    val = chainermn.scatter_dataset(val, comm)
    workers = {"n_processes": args.loaderjob}
    train_iter = chainer.iterators.MultiprocessIterator(train, args.batchsize, **workers)
    val_iter = chainer.iterators.MultiprocessIterator(val, args.val_batchsize, repeat=False, shuffle=False, **workers)

    plain = chainer.optimizers.MomentumSGD(args.learnrate)
    actual = plain if args.recipe == "plain" else optimizers.RMSpropWarmup()
    optimizer = chainermn.create_multi_node_optimizer(actual, comm)
    optimizer.setup(model)
    updater = chainermn.MultiNodeUpdater(train_iter, optimizer, device=device, micro_batches=args.micro_batches)
    stop = (10, "iteration") if args.test else (args.epoch, "epoch")
    every = (5, "iteration") if args.test else (1, "epoch")
    trainer = training.Trainer(updater, stop, out=args.out)

    if args.recipe == "large":
        use_large_batches(trainer, model, comm, args.batchsize, args.epoch)
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm), trigger=every)
    evaluator = TestModeEvaluator(val_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm), trigger=every)
    losses, accuracies = (["main/" + name, "validation/main/" + name] for name in ("loss", "accuracy"))
    report = extensions.PrintReport(["epoch", "iteration", *losses, *accuracies, "validation/main/error"])
    plot = extensions.PlotReport(losses, trigger=every, filename="loss.png")
    # The first and the last of them are called in every iteration, to write means when they choose.
    for extension, trigger in ((extensions.LogReport(trigger=every), None), (report, every), (plot, None)):
        trainer.extend(chainermn.extensions.main_rank_only(extension, comm), trigger=trigger)

    checkpointer = chainermn.create_multi_node_checkpointer(name="imagenet", comm=comm, path=args.out)
    trainer.extend(checkpointer, trigger=every)
    if args.resume:
        chainer.serializers.load_npz(args.resume, trainer)
    else:
        checkpointer.maybe_load(trainer, optimizer)
    trainer.run()

    if comm.rank == 0:
        chainer.serializers.save_npz(f"{args.out}/model.npz", model)
        print(f"validation accuracy: {trainer.observation['validation/main/accuracy']:.4f}")


if __name__ == "__main__":
    # Workers that are forked from a process that has initialised MPI may crash with InfiniBand.
    multiprocessing.set_start_method("forkserver")
    main()
