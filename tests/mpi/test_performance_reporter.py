import time

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm import create_communicator
from mn_comm.building_blocks import activity
from mn_compress import Int8
from mn_data import ElasticIterator
from mn_extensions import PerformanceReporter, performance_reporter
from mn_optim import AfterBackward, DuringBackward, LocalSGD, MultiNodeOptimizer, OneStepLate, StreamingDiLoCo

pytestmark = pytest.mark.sizes(1)

COMM = create_communicator("flat")
RANK, SIZE = COMM.rank, COMM.size
KEYS = ["samples_per_second", "communication", "bytes", "slowest_rank", "lag"]


class Clock:
    """A clock of this rank that shows nothing but its pauses and its waiting, however busy the machine is."""

    pauses = 0.0

    def perf_counter(self):
        return self.pauses + activity().waited / 1e9


class Model(chainer.Chain):
    clock = Clock()

    def __init__(self, pause=0.0):
        super().__init__()
        self.pause = pause
        with self.init_scope():
            self.l = L.Linear(64, 64, nobias=True)

    def forward(self, x):
        time.sleep(self.pause)
        self.clock.pauses += self.pause
        return chainer.functions.sum(self.l(x) ** 2)


NBYTES = 64 * 64 * 4


def entries(when=None, pause=0.0, iterations=12, iterator=None):
    """Train with a report in every fourth iteration; return those of this rank."""
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1e-4), COMM, when or AfterBackward()).setup(Model(pause))
    data = np.ones((40, 64), "f4")
    iterator = iterator or chainer.iterators.SerialIterator(data, 5)
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(iterator, optimizer), (iterations, "iteration"))
    trainer.extend(PerformanceReporter(COMM, report_trigger=(4, "iteration")))
    log = extensions.LogReport(trigger=(4, "iteration"), filename=None)
    trainer.extend(log)
    trainer.run()
    return [{key: entry[f"performance/{key}"] for key in KEYS} for entry in log.log]


def test_all_ranks_have_the_same_numbers():
    found = entries()
    assert len(found) == 3
    assert COMM.allgather_obj(found) == [found] * SIZE
    for entry in found:
        assert 0 <= entry["communication"] < 1
        assert entry["slowest_rank"] in range(SIZE)
        assert entry["lag"] >= 0
        assert entry["samples_per_second"] > 0


@pytest.mark.parametrize(
    "when", [AfterBackward(), DuringBackward(), OneStepLate()], ids=lambda when: type(when).__name__
)
def test_the_rank_that_the_others_wait_for(when, monkeypatch):
    slow = SIZE - 1
    monkeypatch.setattr(performance_reporter, "time", Model.clock)
    entry = entries(when, pause=0.05 if RANK == slow else 0.0)[-1]
    if SIZE == 1:
        assert (entry["lag"], entry["bytes"]) == (0, 0)
        assert 0 < entry["samples_per_second"] <= 5 / 0.05 * (1 + 1e-9)  # it waits for itself, too
        return
    assert entry["slowest_rank"] == slow
    assert entry["lag"] == pytest.approx(0.05)
    assert 0 < entry["communication"] < 1
    assert entry["bytes"] == SIZE * NBYTES


def test_the_sums_of_all_ranks():
    records = [performance_reporter._Record(4, 20, seconds, waited, 100) for seconds, waited in ((2, 0.5), (2.5, 2))]
    assert performance_reporter._summarize(records) == {
        "samples_per_second": 20 / 2 + 20 / 2.5,
        "communication": 2.5 / 4.5,
        "bytes": 50,
        "slowest_rank": 0,
        "lag": 0.25,
    }


BYTES = {
    "exact": (AfterBackward(), 1.0),
    "Int8": (AfterBackward(send=Int8()), (1 + 1 / 64) / 4),
    "LocalSGD": (LocalSGD(4), 0.25),
    "StreamingDiLoCo": (StreamingDiLoCo(4, fragments=1, delay=0), 0.25),
}


@pytest.mark.skipif(SIZE != 2, reason="the number of bytes that compression sends depends on the number of ranks")
@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    when, share = BYTES[name]
    entry = entries(when, iterations=24)[-2]  # the trainer synchronizes in the last one
    assert entry["bytes"] == pytest.approx(share * SIZE * NBYTES, rel=0.01)


def test_a_global_batch_counts_once():
    data = np.ones((80, 64), "f4")
    iterator = ElasticIterator(data, 8, COMM, seed=0, global_batch=True)
    reporter = PerformanceReporter(COMM, report_trigger=(1, "iteration"))
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(1e-4), COMM).setup(Model(pause=0.1))
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(iterator, optimizer), (3, "iteration"))
    trainer.extend(reporter)
    trainer.run()
    assert 0 < trainer.observation["performance/samples_per_second"] < 8 / 0.1


def test_half_precision_counts_half():
    COMM.allreduce_grad_dtype = np.dtype("f2")
    try:
        assert entries()[-1]["bytes"] == (SIZE * NBYTES / 2 if SIZE > 1 else 0)
    finally:
        COMM.allreduce_grad_dtype = None


def test_nothing_is_communicated_between_reports(monkeypatch):
    calls = []
    monkeypatch.setattr(performance_reporter, "transact", lambda comm, do: calls.append(1) or do())
    entries(iterations=12)
    assert len(calls) == 3


def test_fragments_share_a_meeting():
    when = StreamingDiLoCo(4, fragments=2, delay=0)
    optimizer = MultiNodeOptimizer(chainer.optimizers.SGD(), COMM, when)
    assert optimizer.share_of_meeting == 0.5
