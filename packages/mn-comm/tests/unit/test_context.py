import gc
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import pytest

from mn_comm.ranks.context import Contexts


class ManyRanks:
    """Ranks of a large job, of which this process is the first: enough to be split."""

    def __init__(self, size):
        self.size = size

    def allgather(self, mine):
        return [(rank // 2, rank) for rank in range(self.size)]

    def any(self, flag):
        return flag

    def split(self, color, key):
        return object()


def kept_by_a_split(size):
    contexts = Contexts.__new__(Contexts)
    contexts._splits, contexts._n_users = {}, Counter()
    contexts.foreground = SimpleNamespace(ranks=ManyRanks(size))
    part = contexts.split(0, 0)
    assert contexts.split(0, 0) is part
    contexts._splits.clear()
    contexts._n_users.clear()
    tracemalloc.start()
    contexts.split(0, 0)
    gc.collect()  # also the tuples that Python keeps for later
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_split_does_not_need_memory_for_each_rank(size):
    assert kept_by_a_split(size) < 2000
