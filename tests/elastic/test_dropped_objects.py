"""Objects that a script has dropped leave nothing on an elastic communicator that lasts."""

CODE = """
import gc
import chainer
import numpy as np
import chainermn
from chainermn.optimizers import AfterBackward, DuringBackward, MultiNodeOptimizer, OneStepLate

comm = chainermn.create_communicator("flat", elastic=True)
net = chainer.links.Classifier(chainer.links.Linear(4, 2))
batch = np.ones((2, 4), "f"), np.zeros(2, "i")

def use():
    # A reduction of OneStepLate may be under way when its optimizer is dropped; that of DuringBackward waits for it.
    for when in (AfterBackward(), OneStepLate(), DuringBackward()):
        optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), comm, when).setup(net)
        for _ in range(2):
            optimizer.update(net, *batch)
    next(chainermn.iterators.ElasticIterator(np.arange(8), 2, comm, seed=0))
    snapshot = chainer.training.extensions.snapshot()
    chainermn.extensions.multi_node_snapshot(comm, snapshot, [[0, 1]])

def objects_after(times):
    for _ in range(times):
        use()
    gc.collect()
    return len(gc.get_objects())

objects_after(20)  # caches fill
before = objects_after(1)
grown = objects_after(30) - before
assert grown < 30, grown
print("flat")
"""


def test_they_leave_nothing(job):
    assert job(2, CODE) == ["flat"] * 2
