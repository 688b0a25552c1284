"""BLEU, after Papineni et al., "BLEU: a method for automatic evaluation of machine translation", 2002, section 2."""

import math
from collections import Counter


def ngrams(words, n):
    """Count the sequences of n words."""
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu(references, translations, longest=4):
    """Return the BLEU score of a whole corpus, between 0 and 1.

    Args:
        references: A list of sentences, each a list of words.
        translations: A list of as many sentences, in the same order.
        longest: The length of the longest n-grams that count.
    """
    logarithms = []
    for n in range(1, longest + 1):
        pairs = [(ngrams(a, n), ngrams(b, n)) for a, b in zip(references, translations, strict=True)]
        right = sum(sum((a & b).values()) for a, b in pairs)
        total = sum(sum(b.values()) for _, b in pairs)
        if right == 0:
            return 0.0
        logarithms.append(math.log(right / total))
    expected, got = (sum(map(len, sentences)) for sentences in (references, translations))
    brevity = min(0.0, 1 - expected / got)
    return math.exp(brevity + sum(logarithms) / longest)
