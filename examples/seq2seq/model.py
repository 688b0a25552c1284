"""The encoder and the decoder, which may or may not be on the same process."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from corpus import BEGIN, END


def embed_all(embed, sentences):
    """Look up the words of all sentences at once; return a list of one Variable for each."""
    ends = np.cumsum([len(sentence) for sentence in sentences])[:-1]
    return F.split_axis(embed(F.concat(sentences, axis=0)), ends, axis=0)


class Encoder(chainer.Chain):
    """Reads sentences, and returns the result of the recurrent network.

    Args:
        n_words: The size of the vocabulary.
        n_units: Units in each layer.
        rnn: An NStepLSTM, or one whose states are sent to another process.
    """

    def __init__(self, n_words, n_units, rnn):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = rnn

    def forward(self, sentences, *states):
        """Read sentences; ``states`` are the arguments that the recurrent network takes before them."""
        reversed_sentences = [sentence[::-1] for sentence in sentences]
        return self.rnn(*states, embed_all(self.embed, reversed_sentences))


class Decoder(chainer.Chain):
    """Writes sentences.

    Args:
        n_words: The size of the vocabulary.
        n_units: Units in each layer.
        rnn: An NStepLSTM, or one whose first states come from another process.
    """

    def __init__(self, n_words, n_units, rnn):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = rnn
            self.words = L.Linear(n_units, n_words)

    def forward(self, sentences, *states):
        """Return the mean loss per sentence."""
        xp = self.xp
        begin, end = xp.array([BEGIN], np.int32), xp.array([END], np.int32)
        inputs = [F.concat([begin, sentence], axis=0) for sentence in sentences]
        targets = F.concat([F.concat([sentence, end], axis=0) for sentence in sentences], axis=0)
        outputs = self.rnn(*states, embed_all(self.embed, inputs))
        # The list of outputs follows the two states, whatever else the network returns.
        scores = self.words(F.concat(outputs[2], axis=0))
        loss = F.sum(F.softmax_cross_entropy(scores, targets, reduce="no")) / len(sentences)
        chainer.report({"loss": loss}, self)
        return loss

    def translate(self, n_sentences, start, longest=40):
        """Write the likeliest next word until the end, and return int32 arrays.

        Args:
            n_sentences: How many sentences to write.
            start: Called with the embedded first words; returns states and outputs of the network that starts from the
                encoder's states.
            longest: The maximum number of words.
        """
        network = getattr(self.rnn, "actual_rnn", self.rnn)
        words = self.xp.full(n_sentences, BEGIN, np.int32)
        states, written = None, []
        for _ in range(longest):
            xs = F.split_axis(self.embed(words), n_sentences, axis=0, force_tuple=True)
            h, c, ys = (start(xs) if states is None else network(*states, xs))[:3]
            states = h, c
            words = self.words(F.concat(ys, axis=0)).array.argmax(axis=1).astype(np.int32)
            written.append(chainer.backends.cuda.to_cpu(words))
        rows = np.stack(written, axis=1)
        return [row[: (row == END).argmax()] if (row == END).any() else row for row in rows]
