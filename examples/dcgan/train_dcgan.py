"""Train a generator of small pictures against a discriminator, on several processes.

    mpiexec -n 2 python train_dcgan.py

The pictures are those of CIFAR-10 if Chainer has them in its cache, otherwise scikit-learn's digits; or the files of a
folder, of 32 by 32 pixels each.
"""

import argparse
import os

import chainer
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from net import Discriminator, Generator
from updater import DCGANUpdater


def get_pictures(folder):
    """Return a dataset of float32 arrays of shape (3, 32, 32) between 0 and 1."""
    if folder:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".jpg", ".png")))
        images = chainer.datasets.ImageDataset(names, folder)
        return chainer.datasets.TransformDataset(images, as_fraction)
    cache = os.path.join(chainer.dataset.get_dataset_root(), "pfnet/chainer/cifar/cifar-10.npz")
    if os.path.exists(cache):
        return chainer.datasets.get_cifar10(withlabel=False)[0]
    from sklearn.datasets import load_digits

    grey = np.kron(load_digits().images / 16, np.ones((4, 4))).astype(np.float32)
    return np.repeat(grey[:, None], 3, axis=1)


def as_fraction(picture):
    """Return a picture between 0 and 1; a function with a name, because the dataset that calls it is sent."""
    return picture / np.float32(255)


def make_optimizer(model, comm):
    """Return a multi-node optimizer with the settings of the paper."""
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(alpha=0.0002, beta1=0.5), comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.0001))
    return optimizer


def save_pictures(generator, folder, seed, rows=5):
    """Return an extension that writes a sheet of made pictures."""

    @training.make_extension(default_name="save_pictures")
    def extension(trainer):
        from PIL import Image

        state = np.random.get_state()
        np.random.seed(seed)
        noise = generator.make_hidden(rows * rows)
        np.random.set_state(state)
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            made = chainer.backends.cuda.to_cpu(generator(generator.xp.asarray(noise)).array)
        height, width = made.shape[2:]
        sheet = made.reshape(rows, rows, -1, height, width).transpose(0, 3, 1, 4, 2)
        sheet = (sheet.reshape(rows * height, rows * width, -1) * 255).astype(np.uint8)
        os.makedirs(folder, exist_ok=True)
        Image.fromarray(sheet).save(os.path.join(folder, f"image{trainer.updater.iteration:08}.png"))

    return extension


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=50, help="pictures in each process's mini-batch")
    parser.add_argument("--communicator", default="hierarchical", help="how gradients are averaged")
    parser.add_argument("--epoch", "-e", type=int, default=100, help="how often to go through the data")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--dataset", "-i", default="", help="a folder of picture files")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the pictures")
    parser.add_argument("--gen_model", "-r", default="", help="the file of a generator to start from")
    parser.add_argument("--dis_model", "-d", default="", help="the file of a discriminator to start from")
    parser.add_argument("--n_hidden", "-n", type=int, default=100, help="numbers of noise for each picture")
    parser.add_argument("--width", type=int, default=256, help="maps of the widest layer")
    parser.add_argument("--seed", type=int, default=0, help="of the noise for the pictures that are written")
    parser.add_argument("--snapshot_interval", type=int, default=1000, help="iterations between snapshots")
    parser.add_argument("--display_interval", type=int, default=100, help="iterations between lines of the log")
    return parser.parse_args()


def main():
    args = parse_arguments()
    comm = chainermn.create_communicator(args.communicator)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    gen, dis = Generator(args.n_hidden, width=args.width), Discriminator(width=args.width)
    for model, file in ((gen, args.gen_model), (dis, args.dis_model)):
        if file:
            chainer.serializers.load_npz(file, model)
        model.to_device(device)

    pictures = get_pictures(args.dataset) if comm.rank == 0 else None
    train = chainermn.scatter_dataset(pictures, comm, shuffle=True, seed=0)
    updater = DCGANUpdater(
        models=(gen, dis),
        iterator=chainer.iterators.SerialIterator(train, args.batchsize),
        optimizer={"gen": make_optimizer(gen, comm), "dis": make_optimizer(dis, comm)},
        device=device,
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)

    display, save = (args.display_interval, "iteration"), (args.snapshot_interval, "iteration")
    losses = ["gen/loss", "dis/loss"]
    once = [
        (extensions.snapshot_object(gen, "gen_iter_{.updater.iteration}.npz"), save),
        (extensions.snapshot_object(dis, "dis_iter_{.updater.iteration}.npz"), save),
        (save_pictures(gen, os.path.join(args.out, "preview"), args.seed), save),
        # These two see every iteration, to write means at their own time.
        (extensions.LogReport(trigger=display), None),
        (extensions.PlotReport(losses, trigger=display, filename="loss.png"), None),
        (extensions.PrintReport(["epoch", "iteration", *losses]), display),
    ]
    for extension, trigger in once:
        trainer.extend(chainermn.extensions.main_rank_only(extension, comm), trigger=trigger)
    trainer.run()


if __name__ == "__main__":
    main()
