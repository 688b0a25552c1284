"""The binding, with stand-ins for CuPy and nccl4py."""

import sys
import threading
import types

import numpy as np
import pytest

from mn_comm.basis.placement import is_device_array
from mn_comm.device import nccl, nccl_ranks
from mn_comm.device.nccl_ranks import NcclRanks


def test_versions(fake_cupy):
    assert nccl.get_version() == nccl.get_build_version() == 23203
    nccl.require()


def test_the_extra_is_named_when_something_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"^expected CuPy and nccl4py, .*: pip install 'mn-comm\[cuda13\]', or .*$"):
        nccl.get_version()


def test_the_extra_is_named_when_the_library_is_missing(fake_cupy, monkeypatch):
    nothing = types.SimpleNamespace(libnccl=None)
    monkeypatch.setattr(sys.modules["nccl"].core, "get_version", lambda: nothing)
    with pytest.raises(RuntimeError, match=r"^expected libnccl.so.2, found none: pip install 'mn-comm\[cuda13\]'"):
        nccl.require()


def test_one_rank_alone(fake_cupy):
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    array = fake_cupy.asarray(np.arange(4, dtype="f4"))
    with nccl.group():
        communicator.all_reduce(array)
    communicator.all_gather(array)
    communicator.broadcast(array, 0)
    communicator.reduce(array, 0)
    np.testing.assert_array_equal(array.get(), np.arange(4))
    np.testing.assert_array_equal(communicator.reduce_scatter(array).get(), np.arange(4))
    with pytest.raises(ValueError, match=r"expected a C-contiguous array, got strides \(8,\) for shape \(2,\)"):
        communicator.all_reduce(array[::2])
    communicator.destroy()


def test_what_is_alive_at_the_end_is_aborted(fake_cupy):
    calls = sys.modules["nccl"].core.calls
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    del calls[:]
    nccl._abort_all()
    nccl._abort_all()
    assert calls == ["abort"]
    assert communicator not in nccl._alive


def test_which_dtypes_it_adds_up():
    assert all(nccl.supports(np.dtype(name)) for name in ("f2", "f4", "f8", "i1", "u8"))
    assert not any(nccl.supports(np.dtype(name)) for name in (">f4", "c8", "u2", "?", "M8[s]"))


def test_only_cupy_s_arrays_are_on_a_device(fake_cupy):
    assert is_device_array(fake_cupy.asarray([1, 2]))
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
