"""Hundreds of optimizers, one after the other, as in a search for hyperparameters, leave no communicators behind.

An MPI library supports only a few thousand communicators. This limit is that of each process: more than two ranks reach
it no earlier, and only take longer. On a busy machine, each collective call may take milliseconds, so communicators are
counted, instead of creating more than there can be.
"""

import chainer
import numpy as np
import pytest
from communicators import number_of_communicators

from mn_comm import create_communicator
from mn_optim import DuringBackward, MultiNodeOptimizer, OneStepLate

COMM = create_communicator("flat")

pytestmark = [pytest.mark.rest, pytest.mark.skipif(COMM.size > 2, reason="the limit is that of each process")]


@pytest.mark.parametrize("when", [DuringBackward(), OneStepLate()])
def test_any_number_of_optimizers(when):
    model = chainer.Sequential(chainer.links.Linear(5, 8), chainer.functions.relu, chainer.links.Linear(8, 3))
    x = np.full((6, 5), COMM.rank, "f4")
    for i in range(400):
        if i == 100:
            before = number_of_communicators()
        optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when).setup(model)
        if i % 20 == 0:
            optimizer.update(lambda: chainer.functions.sum(model(x)))
            optimizer.update(lambda: chainer.functions.sum(model(x)))
    assert number_of_communicators() <= before
