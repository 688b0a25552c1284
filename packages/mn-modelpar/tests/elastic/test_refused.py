"""A model that spans ranks cannot continue without one of them."""

CODE = """
import chainer
import numpy as np
import pytest
import mn_modelpar
from mn_comm import create_communicator
comm = create_communicator("naive", elastic=True)
with pytest.raises(ValueError, match="expected a communicator made with elastic=False for a model that spans ranks"):
    mn_modelpar.links.MultiNodeChainList(comm)
x = chainer.Variable(np.ones((1, 2), "f"))
with pytest.raises(ValueError, match="elastic=False"):
    mn_modelpar.functions.bcast(comm, x)
with pytest.raises(ValueError, match="elastic=False"):
    mn_modelpar.functions.allreduce(comm, x)
with pytest.raises(ValueError, match="elastic=False"):
    if comm.rank == 0:
        mn_modelpar.functions.send(x, comm, 1)
    else:
        mn_modelpar.functions.recv(comm, 0)
# Of this one all ranks have all.
link = mn_modelpar.links.MultiNodeBatchNormalization(2, comm)
print(float(link(np.full((2, 2), comm.rank, "f")).array.sum()), flush=True)
"""


def test_models_that_span_ranks_are_refused(job):
    printed = sorted(float(line) for line in job(2, CODE))
    assert printed == [-printed[1], printed[1]] and printed[1] > 3.9
