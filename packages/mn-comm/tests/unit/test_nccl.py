"""The binding, where it needs neither CuPy nor NCCL."""

import sys
import threading
import types

import numpy as np
import pytest

from mn_comm.basis.placement import is_device_array
from mn_comm.device import nccl, nccl_ranks
from mn_comm.device.nccl_ranks import NcclRanks


def test_the_extra_is_named_when_something_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"^expected CuPy and nccl4py, .*: pip install 'mn-comm\[cuda13\]', or .*$"):
        nccl.get_version()


def test_the_extra_is_named_when_the_library_is_missing(monkeypatch):
    core = types.SimpleNamespace(get_version=lambda: types.SimpleNamespace(libnccl=None))
    for name, module in (("cupy", types.ModuleType("cupy")), ("nccl", types.SimpleNamespace(core=core))):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match=r"^expected libnccl.so.2, found none: pip install 'mn-comm\[cuda13\]'"):
        nccl.require()


def test_which_dtypes_it_adds_up():
    assert all(nccl.supports(np.dtype(name)) for name in ("f2", "f4", "f8", "i1", "u8"))
    assert not any(nccl.supports(np.dtype(name)) for name in (">f4", "c8", "u2", "?", "M8[s]"))


def test_other_things_are_not_on_a_device():
    assert not any(is_device_array(x) for x in (np.zeros(1), None, [1], np.float32(1), "x"))


def test_two_threads_may_ask_at_the_same_time():
    """The program and the stall monitor: neither forgets an operation that has not ended."""
    ranks = NcclRanks(types.SimpleNamespace(rank=0, allgather=lambda mine: [mine]))
    others = []

    class Ended:
        @property
        def done(self):
            if not others:  # the other thread comes in the middle
                others.append(threading.Thread(target=ranks.poll))
                others[0].start()
                others[0].join(0.5)
            return True

    running = types.SimpleNamespace(done=False)
    communicator = types.SimpleNamespace(problem=lambda: None)
    for event in (Ended(), running):
        ranks._launched.append(nccl_ranks._Launched(event, communicator, "all_reduce", 0))
    ranks.poll()
    others[0].join()
    assert [each.event for each in ranks._launched] == [running]
