"""Every sample is used exactly once an epoch, although ranks die."""

import pytest

CODE = """
import os, signal, sys
import chainer
import chainer.links as L
import numpy as np
from mn_comm import create_communicator
from mn_comm.watch import Activity
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
