"""Processes that read ahead."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest

from mn_data.loading import Loader


class Deadly:
    """A dataset; who reads its sample 5 dies."""

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


# A rank that prints which process reads, and is then killed.
RANK = """
import multiprocessing, os, sys
from mn_data import loading

multiprocessing.set_start_method("fork")  # others could not import this script

class Data:
    def __getitem__(self, index):
        return os.getpid()

"""
# Another process that the rank has started goes on, and holds what it has inherited.
BESIDE_ANOTHER = """
loader = loading.Loader(Data(), 1)
process, = loader.load([0])
if os.fork():
    print(process, flush=True)
sys.stdin.read()
os._exit(0)
"""
# The process that reads is late: it begins when the rank has ended.
LATE = """
begin = loading._begin

def begin_late(dataset):
    print(os.getpid(), flush=True)
    multiprocessing.parent_process().join()
    begin(dataset)

loading._begin = begin_late
loading.Loader(Data(), 1).load([0])
"""


@pytest.mark.parametrize("code", [BESIDE_ANOTHER, LATE])
def test_processes_end_with_a_rank_that_is_killed(code):
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RANK + code], **piped) as rank:
        reader = os.pidfd_open(int(rank.stdout.readline()))
        rank.kill()
        rank.wait()
        ended, *_ = select.select([reader], [], [], 20)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(reader, signal.SIGKILL)
        os.close(reader)
    assert ended


def test_a_thread_that_ends_leaves_the_processes_that_it_has_started():
    loader = Loader(range(8), 2)
    thread = threading.Thread(target=loader.load, args=[range(4)])
    thread.start()
    thread.join()
    for _ in range(20):
        assert loader.load(range(8)) == list(range(8))
    loader.close()


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
