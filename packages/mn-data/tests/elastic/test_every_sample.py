"""Every sample is used exactly once per epoch, although ranks die."""

import pytest

pytestmark = pytest.mark.rest

CODE = """
import os, signal, sys
import chainer
import chainer.links as L
import numpy as np
from mn_comm import create_communicator
from mn_comm.building_blocks import MPI
from mn_comm.ranks.watch import Activity
from mn_data import ElasticIterator

comm = create_communicator("two_dimensional", elastic=True)
me, seed = comm.rank, int(sys.argv[1])
options = eval(sys.argv[2])
plan = np.random.RandomState(seed)
victims = plan.permutation(comm.size)[: comm.size - 1].tolist()
kills = {victim: (int(plan.randint(5, 90)), int(plan.randint(0, 8))) for victim in victims}
used = []
comm.on_commit(lambda: used.extend(int(each) for parts in iterator._under_way for part in parts for each in part))
iterator = ElasticIterator(np.arange(37), 5, comm, seed=seed, **options)

def step():
    "What an optimizer does, with nothing but the samples."
    batch = next(iterator)
    return comm.transact(lambda: comm.allreduce_obj(len(batch)), is_step=True)

def die_at_wait(number):
    wait_for = Activity.wait_for
    left = [number]
    def waits(self, *args):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for(self, *args)
    Activity.wait_for = waits

for number in range(2000):
    if me in kills and kills[me][0] == number:
        die_at_wait(kills[me][1])
    total = step()
    if iterator.epoch >= 60:
        break
iterator.finalize()
assert len(used) == len(set(used)) == iterator._deal.dealt, (len(used), len(set(used)))
assert sorted([*used, *iterator._deal.returned.tolist()]) == list(range(len(used) + len(iterator._deal.returned)))
whole = [epoch for epoch in range(60) if epoch not in {place // 37 for place in iterator._deal.returned}]
for epoch in whole:
    places = np.array([place for place in used if place // 37 == epoch])
    assert sorted(iterator._deal.indices(places)) == list(range(37))
print(comm.size, total, len(whole), flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_each_is_used_once_an_epoch_by_ranks_that_die(job, seed):
    options = [{}, {"global_batch": True}, {"n_processes": 1}, {"shuffle": False}][seed]
    printed = job(4, CODE, str(seed), str(options))
    assert printed == ["1 5 60"]


SAVED = """
import os, signal
import chainer
import numpy as np
import mn_comm
from mn_comm import create_communicator
from mn_comm.building_blocks import MPI
from mn_data import ElasticIterator

comm = create_communicator("naive", elastic=True)
me = comm.rank

def made():
    return ElasticIterator(np.arange(24), 3, comm, shuffle=False)

def state(iterator):
    return chainer.serializers.npz.serialize(iterator)

def loaded(found):
    other = ElasticIterator(np.arange(24), 3, create_communicator("naive", MPI.COMM_SELF), shuffle=False)
    chainer.serializers.npz.NpzDeserializer(found).load(other)
    return [int(each) for each in next(other)]

iterator = made()
fresh = state(iterator)
next(iterator)
print("not used", loaded(state(iterator)), flush=True)

def step():
    if me == 1 and iterator._deal.dealt == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce_obj(1)

comm.transact(step, is_step=True)
print("used", loaded(state(iterator)), flush=True)
next(iterator)
comm.transact(step, is_step=True)
lost = state(iterator)
print("given back", loaded(lost), flush=True)
shapes = lambda found: {name: np.shape(value) for name, value in found.items()}
assert shapes(lost) == shapes(fresh)
"""


def test_what_was_dealt_and_not_used_is_dealt_again_after_a_restart(job):
    before = ["not used [0, 1, 2]"] * 2 + ["used [6, 7, 8]"] * 2
    assert job(2, SAVED) == ["given back [9, 10, 11]", *before]
