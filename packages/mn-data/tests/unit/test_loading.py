"""Processes that read ahead."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from mn_data.loading import Loader


class Deadly:
    """A dataset; who reads its sample 5 dies."""

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_process_that_dies_is_no_wait_forever():
    loader = Loader(Deadly(), 2)
    with pytest.raises(BrokenProcessPool):
        loader.load(range(4, 8))
    loader.close()
    assert loader.load(range(4)) == [0, 1, 2, 3]
    loader.close()


def test_processes_end_while_they_read_ahead():
    loader = Loader([bytes(30_000) for _ in range(64)], 2)
    for _ in range(40):  # multiprocessing.Pool hangs if a process is writing a result then
        loader.load(range(8))
        loader.expect([range(begin, begin + 8) for begin in range(8, 64, 8)])
        loader.expect([range(begin, begin + 8) for begin in range(16, 64, 8)])
        loader.close()


def test_samples_are_in_the_order_of_their_indices():
    loader = Loader(range(100), 3)
    for length in (0, 1, 7, 20):
        indices = list(range(50, 50 - length, -1))
        assert loader.load(indices) == indices
    loader.close()
