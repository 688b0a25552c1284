"""Train a multi-layer perceptron that is split over processes, several copies of it at once.

    mpiexec -n 4 python train_mnist_dual_parallel.py

Processes 2i and 2i+1 share a model, as in train_mnist_model_parallel.py; the halves of all models are averaged.
"""

import argparse

import chainer
import chainer.links as L
import chainermn
from chainer import training
from chainer.training import extensions
from digits import get_digits
from train_mnist_model_parallel import FirstAndLast, Middle


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="images in each pair's mini-batch")
    parser.add_argument("--communicator", "-x", default="hierarchical", help="how gradients are averaged")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the plot")
    parser.add_argument("--unit", "-u", type=int, default=1000, help="units in each hidden layer")
    parser.add_argument("--data", default="", help="an .npz file with x_train, y_train, x_test and y_test")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    if comm.size % 2:
        raise SystemExit(f"expected an even number of processes, got {comm.size}")
    # A pair has one model; processes of equal parity have the same half of every model.
    pair = comm.split(comm.rank // 2, comm.rank)
    copies = comm.split(comm.rank % 2, comm.rank)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    model = L.Classifier(FirstAndLast(pair, args.unit, 10)) if pair.rank == 0 else Middle(pair, args.unit)
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), copies)
    optimizer.setup(model)

    # Each pair has its part of the images; its second process only needs their number.
    train, test = get_digits(args.data) if copies.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, copies, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(test, copies)
    if pair.rank != 0:
        train = chainermn.datasets.create_empty_dataset(train)
        test = chainermn.datasets.create_empty_dataset(test)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, copies))
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
