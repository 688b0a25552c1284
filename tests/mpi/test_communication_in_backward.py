"""Layers that communicate in the backward pass, while gradients are sent at the same time."""

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
import pytest

from mn_optim import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate

COMM = chainermn.create_communicator("flat")


class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(4, 3)
            self.bn = chainermn.links.MultiNodeBatchNormalization(3, COMM)
            self.l2 = L.Linear(3, 2)

    def forward(self, x):
        return F.sum(self.l2(self.bn(self.l1(x))) ** 2)


@pytest.mark.skipif(COMM.size < 2, reason="needs two ranks that differ")
@pytest.mark.parametrize("when", [AfterBackward(), DuringBackward(bucket_bytes=1000), OneStepLate()])
def test_models_that_come_to_differ_raise_on_all_ranks(when):
    model = Model()
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1e-3), COMM, when).setup(model)
    x = np.random.RandomState(COMM.rank).rand(5, 4).astype("f4")
    for _ in range(3):
        optimizer.update(model, x)
    if COMM.rank == COMM.size - 1:
        model.l2.W.array = np.ones((500, 3), "f4")  # fills its own bucket, before the normalisation
        model.l2.b.array = np.ones(500, "f4")
    with pytest.raises(ValueError, match=r"first at /l2/W: shape \(2, 3\) .* on rank 0, shape \(500, 3\)"):
        optimizer.update(model, x)
    # Data that was learned about the ranks' models before does not prevent another try.
    model.l2.W.array, model.l2.b.array = np.ones((2, 3), "f4"), np.ones(2, "f4")
    for _ in range(3):
        optimizer.update(model, x)
    np.testing.assert_array_equal(COMM.bcast(model.l1.W.array), model.l1.W.array)
