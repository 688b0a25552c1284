"""The evaluator, at the end of training."""

from mn_compat.substitution import Fix, Substitution

FIXES = (
    Fix(
        "evaluator_finalize",
        "an evaluator whose iterator is None, as in ChainerMN's old seq2seq examples, raised when training ended",
        Substitution(
            "chainer.training.extensions.evaluator",
            "            iterator.finalize()\n",
            "            iterator is None or iterator.finalize()\n",
        ),
    ),
)
