"""Learn to translate English numbers to French ones, on several processes with a part of the corpus each.

    mpiexec -n 2 python seq2seq.py

Needs num2words.
"""

import argparse

import chainer
import chainer.links as L
import chainermn
from bleu import bleu
from chainer import training
from chainer.training import extensions
from corpus import get_corpus
from model import Decoder, Encoder


class Seq2Seq(chainer.Chain):
    """Encoder and decoder on the same process."""

    def __init__(self, n_layers, n_source, n_target, n_units):
        super().__init__()
        with self.init_scope():
            self.encoder = Encoder(n_source, n_units, L.NStepLSTM(n_layers, n_units, n_units, 0.1))
            self.decoder = Decoder(n_target, n_units, L.NStepLSTM(n_layers, n_units, n_units, 0.1))

    def forward(self, sources, targets):
        """Return the mean loss per sentence."""
        h, c, _ = self.encoder(sources, None, None)
        return self.decoder(targets, h, c)

    def translate(self, sources):
        """Return the likeliest translations, word for word."""
        with chainer.no_backprop_mode(), chainer.using_config("train", False):
            h, c, _ = self.encoder(sources, None, None)
            return self.decoder.translate(len(sources), lambda xs: self.decoder.rnn(h, c, xs))


@chainer.dataset.converter()
def convert(batch, device):
    """Return sentences of different lengths as lists of arrays on a device."""
    return tuple([device.send(sentence) for sentence in column] for column in zip(*batch, strict=True))


def make_parser(description):
    """Return a parser of the options of both examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batchsize", "-b", type=int, default=64, help="sentences in each mini-batch")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="how often to go through the corpus")
    parser.add_argument("--gpu", "-g", action="store_true", help="use GPUs: on each host process i takes GPU i")
    parser.add_argument("--layer", "-l", type=int, default=1, help="layers of each network")
    parser.add_argument("--out", "-o", default="result", help="the folder for the log and the plot")
    parser.add_argument("--size", type=int, default=3000, help="sentences in the corpus")
    parser.add_argument("--unit", "-u", type=int, default=128, help="units in each layer")
    return parser


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--communicator", "-x", default="hierarchical", help="how gradients are averaged")
    args = parser.parse_args()
    comm = chainermn.create_communicator(args.communicator)
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    source, target, train, test = get_corpus(args.size)
    model = Seq2Seq(args.layer, len(source), len(target), args.unit)
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(5e-3), comm)
    optimizer.setup(model)
    train = chainermn.scatter_dataset(train if comm.rank == 0 else None, comm, shuffle=True, seed=0)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    updater = training.StandardUpdater(train_iter, optimizer, converter=convert, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/decoder/loss", "elapsed_time"]))
        trainer.extend(extensions.PlotReport(["main/decoder/loss"], "epoch", filename="loss.png"))
    trainer.run()

    mine = test[comm.rank :: comm.size]
    translations = model.translate([device.send(sentence) for sentence, _ in mine])
    pairs = comm.gather_obj(
        [(target.decode(b), target.decode(t)) for (_, b), t in zip(mine, translations, strict=True)]
    )
    if comm.rank == 0:
        references, translated = zip(*(pair for part in pairs for pair in part), strict=True)
        print("for example:", " ".join(translated[0]), "| expected:", " ".join(references[0]))
        print(f"BLEU: {bleu(references, translated):.4f}")


if __name__ == "__main__":
    main()
