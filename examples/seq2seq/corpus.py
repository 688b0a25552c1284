"""A small real corpus without downloads: numbers spelled out in English and in French."""

import numpy as np
from num2words import num2words

PAD, END, BEGIN = -1, 0, 1


class Vocabulary:
    """Words and their numbers; the first two numbers are the end and the beginning of a sentence."""

    def __init__(self, sentences):
        self.words = ["<end>", "<begin>", *sorted({word for sentence in sentences for word in sentence})]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self):
        return len(self.words)

    def encode(self, sentence):
        """Return the numbers of words."""
        return np.array([self.numbers[word] for word in sentence], np.int32)

    def decode(self, numbers):
        """Return the words of numbers."""
        return [self.words[number] for number in numbers]


def spell(number, language):
    """Return the words of a number."""
    return num2words(number, lang=language).replace("-", " - ").replace(",", " ,").split()


def get_corpus(size=3000, seed=0):
    """Return English and French vocabularies, and pairs of sentences for training and for testing.

    Args:
        size: How many numbers, drawn from 0 to 999,999; one in ten is for testing.
        seed: The seed of the draw.

    Returns:
        Two vocabularies, and two lists of pairs of int32 arrays.
    """
    numbers = np.random.RandomState(seed).choice(1_000_000, size, replace=False)
    english, french = ([spell(int(number), language) for number in numbers] for language in ("en", "fr"))
    source, target = Vocabulary(english), Vocabulary(french)
    pairs = [(source.encode(a), target.encode(b)) for a, b in zip(english, french, strict=True)]
    test = pairs[9::10]
    train = [pair for position, pair in enumerate(pairs) if position % 10 != 9]
    return source, target, train, test
