"""The timeline between ranks: clocks, who decides, and what is recorded of an averaging."""

import atexit
import threading
import time
import types

import numpy as np
import pytest
from mpi4py import MPI

import mn_comm.nccl  # noqa: F401 - before there are stand-ins, which it would look at
from mn_comm import create_communicator, stall
from mn_comm.gradients import agree, recorded, reducer
from mn_comm.timeline import clock, record, start

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SOON = 20.0


class Param:
    def __init__(self, data):
        self.data = data
        self.grad = data


class Model:
    def __init__(self, *sizes):
        self.params = [Param(np.full(size, RANK, "f4")) for size in sizes]

    def namedparams(self):
        return iter([(f"/{i}", param) for i, param in enumerate(self.params)])


@pytest.fixture
def recorder(monkeypatch):
    made = record.Recorder()
    monkeypatch.setattr(record, "active", made)
    return made


@pytest.mark.parametrize("ahead", [0, 5_000_000_000, -3_000_000])
def test_clocks_are_compared_within_the_error(monkeypatch, ahead):
    """All processes of a host have the same clock, so that how far it was put wrong is known."""
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
    if RANK == 1:  # the question is still there
        assert clock.receive(mpi_comm, np.zeros(1, np.int64), 0, clock.PING, time.monotonic() + SOON) == clock.PING
    mpi_comm.Free()


def test_rank_0_decides(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "active", None)
    monkeypatch.setattr(start, "_collector", None)
    monkeypatch.delenv("CHAINERMN_TIMELINE", raising=False)
    if RANK == 0:
        monkeypatch.setenv("CHAINERMN_TIMELINE", str(tmp_path / "t.json"))
    start._file.cache_clear()
    mine = WORLD.Split(RANK, 0)
    try:
        alone = create_communicator("flat", mine)  # not of all ranks, but for one rank
        assert (record.active is not None) == (RANK == 0)
        comm = create_communicator("flat")
        assert record.active is not None
        collector = start._collector
        atexit.unregister(collector.finish)
        assert collector.is_aligned
        assert len(collector._samples) == 1
        create_communicator("flat").finalize()
        assert start._collector is collector
        collector._mpi_comm.Free()
        comm.finalize()
        alone.finalize()
    finally:
        start._file.cache_clear()
        mine.Free()


def test_otherwise_nothing_of_it_is_touched(monkeypatch, name):
    """A call of any of these would be an error; what is left is ``is None``."""
    assert record.active is None
    for module, attribute in [(record, "recorded"), (record, "_Span"), (recorded, "recorded_round")]:
        monkeypatch.setattr(module, attribute, None)
    monkeypatch.setattr(record.Recorder, "add", None)
    comm = create_communicator(name)
    model = Model(10, 100_000)
    for _ in range(2):
        comm.multi_node_mean_grad(model)
        comm.allreduce_obj(1)
    background = comm.background_reducer()
    assert type(background._thread).__name__ == "ThreadPoolExecutor"
    current = background.start(model, zero_fill=True)
    current.ready_all()
    current.wait()
    background.close()
    comm.finalize()


def test_how_often_it_is_asked_whether_there_is_a_timeline(monkeypatch):
    """Three times for an averaging, of however many buckets."""

    class Record:
        asked = 0

        @property
        def active(self):
            Record.asked += 1

    for module in (stall, reducer, agree):
        monkeypatch.setattr(module, "record", Record())
    comm = create_communicator("naive")
    for model in (Model(10), Model(*range(1, 30))):
        comm.multi_node_mean_grad(model)
        Record.asked = 0
        comm.multi_node_mean_grad(model)
        assert Record.asked == 3
    comm.finalize()


def test_arrays_on_devices_are_recorded(recorder, fake_cupy):
    fake_cupy.cuda.Device(RANK % fake_cupy.DEVICES).use()
    comm = create_communicator("pure_nccl")
    model = Model(10, 20)
    for param in model.params:
        param.data = param.grad = fake_cupy.asarray(param.data)
    comm.multi_node_mean_grad(model)
    background = comm.background_reducer(bucket_bytes=40)
    current = background.start(model, zero_fill=True)
    current.ready_all()
    current.wait()
    background.close()
    comm.finalize()
    found = [(recorder.threads[event[3]], event[4]) for event in recorder.events if event[0] == "communicate"]
    main = threading.current_thread().name
    assert [(name == main, details["bytes"]) for name, details in found] == [(True, 120), (False, 40), (False, 80)]
    assert {details["strategy"] for _, details in found} == {"PureNccl"}


def test_an_averaging_is_recorded(recorder, name):
    comm = create_communicator(name)
    model = Model(10, 100_000)
    comm.multi_node_mean_grad(model)
    strategy = type(comm._strategy).__name__
    comm.finalize()
    events = {}
    for event in recorder.events:
        events.setdefault(event[0], []).append(event)
    (whole,) = events["multi_node_mean_grad"]
    assert sum(event[4]["bytes"] for event in events["communicate"]) == 400_040
    assert {event[4]["strategy"] for event in events["communicate"]} == {strategy}
    count = len(events["communicate"])
    for kind in ("pack", "communicate", "view"):
        assert [event[4]["bucket"] for event in events[kind]] == list(range(count))
        assert all(whole[1] <= event[1] <= event[2] <= whole[2] for event in events[kind])
    for pack, communicate, view in zip(events["pack"], events["communicate"], events["view"], strict=True):
        assert pack[2] <= communicate[1]
        assert communicate[2] <= view[1]
    assert "wait" not in events
    assert all((param.grad == (SIZE - 1) / 2).all() for param in model.params)


def test_an_averaging_in_the_background_is_recorded(recorder):
    comm = create_communicator("two_dimensional")
    background = comm.background_reducer(bucket_bytes=1000)
    model = Model(10, 300, 300)
    current = background.start(model, zero_fill=True)
    current.ready_all()
    current.wait()
    background.close()
    comm.finalize()
    threads = {recorder.threads[event[3]] for event in recorder.events if event[0] == "communicate"}
    assert len(threads) == 1
    assert threads.pop().startswith("mn_comm")
    for kind in ("pack", "communicate", "wait", "view"):
        assert [event[4]["bucket"] for event in recorder.events if event[0] == kind] == [0, 1, 2]
    for one, other in [("pack", "communicate"), ("communicate", "view")]:
        for bucket in range(3):
            first, second = (
                next(e for e in recorder.events if e[0] == kind and e[4]["bucket"] == bucket) for kind in (one, other)
            )
            assert first[2] <= second[1]
    for bucket in range(3):  # waiting ends when the communication has ended, and not before
        communicate, wait = (
            next(e for e in recorder.events if e[0] == kind and e[4]["bucket"] == bucket)
            for kind in ("communicate", "wait")
        )
        assert communicate[1] <= wait[2]
