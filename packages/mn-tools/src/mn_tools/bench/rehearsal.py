"""Training steps without a framework: computation of a given length, and the averages of a multi-node optimizer.

The computation multiplies small matrices, a fixed number of times, so that it takes longer while other threads use the
cores. A third of it is the forward pass. The rest is the backward pass, which computes as long for one matrix of the
model as for any other, the last ones first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mn_comm import Communicator, raise_on_all
from mn_comm.building_blocks import Reduction
from mn_tools.bench.choices import AFTER, DURING, LATE, SENDS, Choice
from mn_tools.bench.contestants import Model
from mn_tools.bench.measure import Turn
from mn_tools.bench.models import Arrays

BUCKET_BYTES = 4 * 1024 * 1024
"""The bytes that ``DuringBackward`` sends together."""
LOCAL_STEPS = 4
"""The steps of a turn of local steps."""

_WIDTH = 160
_CALIBRATION_SECONDS = 0.3


class Work:
    """Computation that keeps a core busy, outside Python's lock.

    Args:
        mpi_comm: The ranks, all of which compute at the same time; collective.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._factor = np.full((_WIDTH, _WIDTH), 1 / _WIDTH, np.float32)
        self._product = np.empty_like(self._factor)
        self.run(20)
        mpi_comm.Barrier()
        begin = time.perf_counter()
        units, seconds = 0, 0.0
        while seconds < _CALIBRATION_SECONDS:  # at least once, even if another program had the core for so long
            self.run(10)
            units += 10
            seconds = time.perf_counter() - begin
        self.per_second = mpi_comm.allreduce(units / seconds) / mpi_comm.size

    def run(self, units: int) -> None:
        """Compute."""
        for _ in range(units):
            np.dot(self._factor, self._factor, out=self._product)


class Replica(Model):
    """A rank's copy of a model, and its computation.

    Args:
        arrays: The arrays.
        work: What computes.
        seconds: How long a forward and a backward pass take.

    Attributes:
        forward_units: The work of the forward pass.
        backward_units: The work of the backward pass before the gradient of each array is there.
        share: Which part of the model it is.
        last: The last bucket's share of the gradients.
    """

    def __init__(self, arrays: Arrays, work: Work, seconds: float) -> None:
        super().__init__(np.zeros(shape, np.float32) for shape in arrays.shapes)
        self._work = work
        random = np.random.default_rng(0)
        # One gradient for all arrays of a size: a large model has to fit several times.
        self._gradients = {shape: random.standard_normal(shape, np.float32) for shape in set(arrays.shapes)}
        units = seconds * work.per_second
        is_matrix = [len(shape) > 1 for shape in arrays.shapes] or [True]
        bounds = np.cumsum([0, *(is_matrix if any(is_matrix) else [True] * len(is_matrix))])
        self.forward_units = round(units / 3)
        self.backward_units: list[int] = np.diff(np.round(bounds / bounds[-1] * units * 2 / 3).astype(int)).tolist()
        self.share = arrays.share
        self.last = min(1.0, BUCKET_BYTES * arrays.share / arrays.nbytes)

    def forward(self) -> None:
        """Compute, without a result."""
        self._work.run(self.forward_units)

    def backward(self, on_final: Callable[[str], None] = lambda name: None) -> None:
        """Compute the gradients, each in a new array.

        Args:
            on_final: Called with the name of each gradient when it is there.
        """
        for param in self._params:
            param.grad = None
        for (name, param), units in zip(reversed(self._named), reversed(self.backward_units), strict=True):
            self._work.run(units)
            param.grad = self._gradients[param.data.shape].copy()
            on_final(name)

    def update(self) -> None:
        """Take a step of gradient descent."""
        for param in self._params:
            param.data -= 1e-6 * param.grad

    def compute(self) -> None:
        """Take a step alone."""
        self.forward()
        self.backward()
        self.update()

    @property
    def order(self) -> list[str]:
        """The names, in the order in which gradients become final."""
        return [name for name, _ in reversed(self._named)]


def turn_of(choice: Choice, comm: Communicator, replica: Replica, bucket_bytes: int = BUCKET_BYTES) -> Turn:
    """Return a step of training in which gradients are averaged; collective.

    Args:
        choice: How.
        comm: Its communicator.
        replica: The model.
        bucket_bytes: The bytes that are sent together during a backward pass.
    """
    if choice.when == AFTER:
        return Turn(_after(choice, comm, replica))
    if choice.when == DURING:
        return Turn(_during(choice, comm, replica, bucket_bytes))
    assert choice.when == LATE
    late = _Late(choice, comm, replica)
    return Turn(late.step, late.step, late.drain)


def _after(choice: Choice, comm: Communicator, replica: Replica) -> Callable[[], None]:
    average = (
        comm.gradient_reducer(compression=SENDS[choice.send]).average if choice.send else comm.multi_node_mean_grad
    )

    def step() -> None:
        replica.forward()
        replica.backward()
        average(replica)
        replica.update()

    return step


def _during(choice: Choice, comm: Communicator, replica: Replica, bucket_bytes: int) -> Callable[[], None]:
    reducer = comm.gradient_reducer(background=True, bucket_bytes=bucket_bytes, compression=SENDS.get(choice.send))

    def step() -> None:
        replica.forward()
        reduction = reducer.start(replica, order=replica.order)
        replica.backward(reduction.ready)
        reduction.ready_all()
        reduction.wait()
        replica.update()

    return step


class _Late:
    """Steps that apply the means of the previous step, while their own are averaged."""

    def __init__(self, choice: Choice, comm: Communicator, replica: Replica) -> None:
        self._comm = comm
        self._replica = replica
        self._reducer = comm.gradient_reducer(background=True, sets=2, compression=SENDS.get(choice.send))
        self._previous: Reduction | None = None

    def step(self) -> None:
        self._replica.forward()
        self._replica.backward()
        current = self._reducer.start(self._replica)
        current.agree()
        with raise_on_all(self._comm):
            current.ready_all()
        if self._previous is not None:
            self._previous.wait()
            self._replica.update()
        self._previous = current

    def drain(self) -> None:
        self._reducer.drain()
        self._previous = None


def local_turn(comm: Communicator, replica: Replica, clock: list[float]) -> Turn:
    """Return some local steps and a meeting, as local SGD has them.

    Args:
        comm: The communicator.
        replica: The model.
        clock: Each turn adds the seconds of one local step, and the seconds of the meeting.
    """
    params = [param for _, param in replica.namedparams()]
    common = [param.data.copy() for param in params]

    def run() -> None:
        begin = time.perf_counter()
        for _ in range(LOCAL_STEPS):
            replica.compute()
        met = time.perf_counter()
        for param, shared in zip(params, common, strict=True):
            param.grad = shared.copy()
            param.grad -= param.data
        comm.multi_node_mean_grad(replica)
        for param, shared in zip(params, common, strict=True):
            shared -= param.grad
            param.data[...] = shared
        clock.extend([(met - begin) / LOCAL_STEPS, time.perf_counter() - met])

    return Turn(run)
