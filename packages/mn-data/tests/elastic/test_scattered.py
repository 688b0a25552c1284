"""Data that is divided among the ranks, when a rank is lost."""

import pytest

pytestmark = pytest.mark.rest

CODE = """
import os, signal, sys
import numpy as np
import pytest
from mn_comm import RankLost, create_communicator
from mn_data import create_multi_node_iterator, create_synchronized_iterator, scatter_dataset
comm = create_communicator("naive", elastic=True)
for create in (create_multi_node_iterator, create_synchronized_iterator):
    with pytest.raises(ValueError, match="use mn_data.ElasticIterator"):
        create(None, comm)
me = comm.rank
part = scatter_dataset(np.arange(12.0) if me == 0 else None, comm)
for victim in (1, 3):
    if me == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except RankLost:
        pass
print([float(each) for each in part], flush=True)
"""


def test_the_part_that_is_lost_is_named(job):
    assert job(4, CODE) == ["[0.0, 1.0, 2.0]", "[6.0, 7.0, 8.0]"]
    # The second victim is rank 2 of the remaining ranks, which still has the part that it got as rank 3.
    assert "samples 3 to 5 of 12, in the order of scatter_dataset, were lost with rank 1" in job.stderr
    assert "samples 9 to 11 of 12, in the order of scatter_dataset, were lost with rank 2" in job.stderr


DIES_MEANWHILE = """
import os, signal, sys
from mn_comm import create_communicator
from mn_comm.ranks.watch import Activity
from mn_data import scatter_dataset, scatter_index
comm = create_communicator("naive", elastic=True)
me, left = comm.rank, [int(sys.argv[2])]
wait_for = Activity.wait_for
def waits(self, *args):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_for(self, *args)
if me == 1:
    Activity.wait_for = waits
if sys.argv[1] == "dataset":
    part = list(scatter_dataset([*range(6)], comm))
else:
    part = [*range(*scatter_index(6, comm))]
print(part, comm.size, flush=True)
"""


@pytest.mark.parametrize("what", ["dataset", "index"])
@pytest.mark.parametrize("wait", range(3))
def test_a_rank_that_is_lost_meanwhile_gets_no_part(job, what, wait):
    assert job(3, DIES_MEANWHILE, what, str(wait)) == ["[0, 1, 2] 2", "[3, 4, 5] 2"]


RENUMBERED = """
import os, signal, sys
from mn_comm import create_communicator
from mn_data import scatter_dataset, scatter_index
comm = create_communicator("naive", elastic=True)
root, has_it = int(sys.argv[2]), comm.rank == int(sys.argv[2])
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if sys.argv[1] == "dataset":
        part = list(scatter_dataset([*range(6)] if has_it else None, comm, root))
    else:
        part = [*range(*scatter_index(6 if has_it else None, comm, root))]
    print(part, comm.size, flush=True)
except RuntimeError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("what", ["dataset", "index"])
def test_the_root_keeps_its_dataset_when_it_gets_another_number(job, what):
    assert job(3, RENUMBERED, what, "2") == ["[0, 1, 2] 2", "[3, 4, 5] 2"]
    assert job(3, RENUMBERED, what, "0") == ["the dataset is lost with its root, rank 0 of 3"] * 2
