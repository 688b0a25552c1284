"""The timeline between ranks: clocks, which rank decides, and the spans of an averaging."""

import gc
import time
import types
import weakref

import numpy as np
import pytest
from fake_model import Model, Param
from mpi4py import MPI

from mn_comm import create_communicator
from mn_comm.building_blocks import is_recording
from mn_comm.ranks import spans
from mn_tools.timeline import clock, collect, record, start
from mn_tools.timeline.clock import Sample
from mn_tools.timeline.collect import Collector

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SOON = 20.0


def make_model(*sizes):
    arrays = [np.full(size, RANK, "f4") for size in sizes]
    return Model(**{f"p{i}": Param(array, array) for i, array in enumerate(arrays)})


@pytest.fixture
def recorder(monkeypatch):
    made = record.Recorder()
    monkeypatch.setattr(spans, "_recorder", made)
    return made


@pytest.mark.parametrize("ahead", [0, 5_000_000_000, -3_000_000])
def test_clocks_are_compared_within_the_error(monkeypatch, ahead):
    """All processes of a host have the same clock, so the applied difference is known."""
    mine = ahead * RANK
    monkeypatch.setattr(
        clock,
        "time",
        types.SimpleNamespace(monotonic=time.monotonic, perf_counter_ns=lambda: time.perf_counter_ns() + mine),
    )
    mpi_comm = WORLD.Dup()
    if RANK == 0:
        for rank in range(1, SIZE):
            assert clock.tell(mpi_comm, rank, clock.measure(mpi_comm, rank, SOON), SOON)
    else:
        (sample,) = clock.reply(mpi_comm, SOON)
        assert abs(sample.offset - mine) <= sample.error
        assert 0 < sample.error < 1e9
    mpi_comm.Free()


@pytest.mark.skipif(SIZE < 2, reason="needs another rank")
def test_who_says_nothing_is_not_waited_for():
    mpi_comm = WORLD.Dup()
    if RANK == 0:
        assert clock.measure(mpi_comm, 1, 0.05) is None
    elif RANK == 1:
        assert clock.receive(mpi_comm, np.zeros(1, np.int64), 0, clock.HELLO, time.monotonic() + 0.05) is None
    else:
        assert clock.reply(mpi_comm, 0.05) is None
    WORLD.Barrier()
    if RANK == 1:  # the question has not been received yet
        assert clock.receive(mpi_comm, np.zeros(1, np.int64), 0, clock.PING, time.monotonic() + SOON) == clock.PING
    mpi_comm.Free()


@pytest.mark.skipif(SIZE < 2, reason="nothing is compared")
def test_a_signal_handler_may_raise_while_clocks_are_compared(monkeypatch, tmp_path):
    """Rank 0's question comes later, and is written to memory that is still there."""
    collector = Collector(record.Recorder(), str(tmp_path / "t.json"))
    collector._pid = None  # so that it does nothing at exit
    found = []

    def interrupted():
        raise TimeoutError

    def receive(mpi_comm, buffer, *args):
        found.append(weakref.ref(buffer))
        return original(mpi_comm, buffer, *args)

    original = clock.receive
    monkeypatch.setattr(clock, "receive", receive)
    monkeypatch.setattr(clock.os, "sched_yield", interrupted)
    with pytest.raises(TimeoutError):
        collector.align(WORLD)
    gc.collect()
    assert found[-1]() is not None  # an earlier message may have arrived at once
    collector._mpi_comm.Free()


def test_rank_0_decides(monkeypatch, tmp_path):
    monkeypatch.setattr(spans, "_recorder", None)
    monkeypatch.setattr(start, "_collector", None)
    monkeypatch.delenv("CHAINERMN_TIMELINE", raising=False)
    if RANK == 0:
        monkeypatch.setenv("CHAINERMN_TIMELINE", str(tmp_path / "t.json"))
    start._absolute.cache_clear()
    mine, everybody, again = WORLD.Split(RANK, 0), WORLD.Dup(), WORLD.Dup()
    try:
        create_communicator("flat", mine)  # not of all ranks, but for one rank
        assert is_recording() == (RANK == 0)
        create_communicator("flat", everybody)
        assert is_recording()
        collector = start._collector
        collector._pid = None  # so that it does nothing at exit
        assert collector.is_aligned
        assert len(collector._samples) == 1
        create_communicator("flat", again)
        assert start._collector is collector
        collector._mpi_comm.Free()
    finally:
        start._absolute.cache_clear()
        for mpi_comm in (mine, everybody, again):
            mpi_comm.Free()


@pytest.mark.skipif(SIZE < 2, reason="needs another rank")
def test_spans_that_rank_0_receives_after_their_rank_has_given_up(monkeypatch, tmp_path):
    recorder = record.Recorder()
    recorder.events = [("a", 1, 2, 7, {"text": "a" * 40_000_000})]
    collector = collect.Collector(recorder, str(tmp_path / "t.json"))
    collector._pid = None  # so that it does nothing at exit
    collector._mpi_comm = WORLD.Dup()
    if RANK == 0:
        assert clock.tell(collector._mpi_comm, 1, Sample(1, 2, 3), SOON)
    elif RANK == 1:
        monkeypatch.setattr(collect, "_soon", lambda: 0.0)
        assert not collector._hand_over()
        others = [b"b" * 40_000_000 for _ in range(3)]
    WORLD.Barrier()
    if RANK == 0:
        status = MPI.Status()
        collector._mpi_comm.Probe(1, clock.EVENTS, status)
        (part,) = collector._receive(status)
        assert [tuple(event) for event in part.events] == recorder.events
        assert clock.receive(collector._mpi_comm, bytearray(), 1, clock.HELLO, time.monotonic() + SOON) == clock.HELLO
    WORLD.Barrier()
    if RANK == 1:
        assert len(others) == 3
    collector._mpi_comm.Free()


def test_otherwise_nothing_of_it_is_touched(monkeypatch, name):
    assert not is_recording()
    monkeypatch.setattr(record.Recorder, "span", None)
    monkeypatch.setattr(record.Recorder, "add", None)
    comm = create_communicator(name)
    model = make_model(10, 100_000)
    for _ in range(2):
        comm.multi_node_mean_grad(model)
        comm.allreduce_obj(1)
    current = comm.gradient_reducer(background=True).start(model)
    current.ready_all()
    current.wait()


def test_an_averaging_is_recorded(recorder, name):
    comm = create_communicator(name)
    model = make_model(10, 100_000)
    comm.multi_node_mean_grad(model)
    whole, agree, communicate = (
        next(event for event in recorder.events if event[0] == kind)
        for kind in ("multi_node_mean_grad", "agree", "communicate")
    )
    assert communicate[4] == {"bytes": 400_040, "strategy": name}
    assert whole[1] <= agree[1] <= agree[2] <= communicate[1] <= communicate[2] <= whole[2]
    assert all((param.grad == (SIZE - 1) / 2).all() for param in model.params.values())


def test_an_averaging_in_the_background_is_recorded(recorder):
    comm = create_communicator("two_dimensional")
    current = comm.gradient_reducer(background=True, bucket_bytes=1000).start(make_model(10, 300, 300))
    current.ready_all()
    current.wait()
    threads = {recorder.threads[event[3]] for event in recorder.events if event[0] == "communicate"}
    assert threads == {"mn_comm"}
    found = {
        kind: [event for event in recorder.events if event[0] == kind]
        for kind in ("pack", "communicate", "wait", "unpack")
    }
    for events in found.values():
        assert [event[4]["bucket"] for event in events] == [0, 1, 2]
    for pack, communicate, wait, unpack in zip(*found.values(), strict=True):
        assert pack[2] <= communicate[1] <= communicate[2] <= unpack[1]
        assert communicate[1] <= wait[2]  # waiting ends when the communication has ended, and not before
