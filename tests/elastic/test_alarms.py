"""No false alarms while a thread averages in the background: Open MPI's votes sometimes fail then."""

import pytest

pytestmark = pytest.mark.rest

SCRIPT = """
import chainer
import chainermn
import numpy as np
from chainermn.optimizers import DuringBackward, MultiNodeOptimizer, OneStepLate

comm = chainermn.create_communicator("two_dimensional", elastic=True)
x, t = np.ones((4, 5), "f4"), np.zeros(4, "i4")
for _ in range(120):
    for when in (True, DuringBackward(), OneStepLate()):
        model = chainer.links.Classifier(chainer.links.Linear(5, 3))
        optimizer = MultiNodeOptimizer(chainer.optimizers.Adam(), comm, when).setup(model)
        for _ in range(4):
            optimizer.update(model, x, t)
    comm.transact(lambda: comm.allreduce(np.ones(10)))
print("generation", comm.generation)
"""


def test_votes_while_a_thread_averages(survivors, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = survivors("script.py")
    assert printed.splitlines() == ["generation 0"] * 3
    assert "lost no rank" not in survivors.stderr
