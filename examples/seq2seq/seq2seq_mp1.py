"""Learn to translate English numbers to French ones, the encoder on one process and the decoder on another.

    mpiexec -n 2 python seq2seq_mp1.py

Process 0 reads English, and its hidden states are sent to process 1, which writes French. Needs num2words.
"""

import chainer
import chainer.links as L
import chainermn
import numpy as np
from bleu import bleu
from chainer import training
from chainer.training import extensions
from corpus import get_corpus
from model import Decoder, Encoder
from seq2seq import convert, make_parser


class EncoderRank(chainer.Chain):
    """The part of process 0."""

    def __init__(self, comm, n_layers, n_words, n_units):
        super().__init__()
        rnn = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
        with self.init_scope():
            self.encoder = Encoder(
                n_words, n_units, chainermn.links.create_multi_node_n_step_rnn(rnn, comm, rank_out=1)
            )

    def forward(self, sources, _):
        """Read the sentences; return the delegate variable, from which the backward pass starts."""
        return self.encoder(sources)[-1]


class DecoderRank(chainer.Chain):
    """The part of process 1."""

    def __init__(self, comm, n_layers, n_words, n_units):
        super().__init__()
        rnn = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
        with self.init_scope():
            self.decoder = Decoder(n_words, n_units, chainermn.links.create_multi_node_n_step_rnn(rnn, comm, rank_in=0))

    def forward(self, _, targets):
        """Return the mean loss per sentence."""
        return self.decoder(targets)

    def translate(self, n_sentences):
        """Return the likeliest translations of the sentences that process 0 reads, word for word."""
        return self.decoder.translate(n_sentences, self.decoder.rnn)


def main():
    args = make_parser(__doc__).parse_args()
    comm = chainermn.create_communicator("naive")
    if comm.size != 2:
        raise SystemExit(f"expected 2 processes, got {comm.size}")
    device = chainer.get_device(comm.intra_rank if args.gpu else -1)
    device.use()

    source, target, train, test = get_corpus(args.size)
    kind, n_words = (EncoderRank, len(source)) if comm.rank == 0 else (DecoderRank, len(target))
    model = kind(comm, args.layer, n_words, args.unit)
    model.to_device(device)
    # Each process optimizes its half of the model.
    optimizer = chainer.optimizers.Adam(5e-3)
    optimizer.setup(model)
    # The same order on both processes.
    sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(0))
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize, order_sampler=sampler)
    updater = training.StandardUpdater(train_iter, optimizer, converter=convert, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    if comm.rank == 1:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/decoder/loss", "elapsed_time"]))
        trainer.extend(extensions.PlotReport(["main/decoder/loss"], "epoch", filename="loss.png"))
    trainer.run()

    sources, targets = convert(test, device)
    with chainer.no_backprop_mode(), chainer.using_config("train", False):
        if comm.rank == 0:
            model(sources, None)
        else:
            translated = [target.decode(words) for words in model.translate(len(targets))]
            references = [target.decode(words) for _, words in test]
            print("for example:", " ".join(translated[0]), "| expected:", " ".join(references[0]))
            print(f"BLEU: {bleu(references, translated):.4f}")


if __name__ == "__main__":
    main()
