"""Repeated averaging of the parameters in the background, for which no rank waits."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda

from mn_comm import CommunicatorBase, Future, raise_on_all
from mn_comm.building_blocks import GradientReducer, Worker, at_exit, waiting_for
from mn_optim.join_state import describe, expect_no_failure
from mn_optim.schemes.arrays import average_arrays
from mn_optim.schemes.parameters import initialised_parameters, set_value, value_of
from mn_optim.schemes.scheme import Backward, Scheme, TakeStep
from mn_optim.side_effects import communicating_links

_FLAGS = "~has ended, restarts"  # not the name of a parameter: those begin with a slash


class AsynchronousMean(Scheme):
    """Each rank takes its own steps while a thread averages copies of the parameters over all ranks.

    In each round, a rank sends a copy of its parameters. When the mean has arrived, it adds the difference between the
    mean and the copy after its next step, so that it keeps the changes that it made in the meantime. Two flags are
    sent with the parameters: whether the rank has ended, and whether it begins again with other parameters. In the
    round in which all ranks have ended, the mean becomes the parameters, and no other round follows. So all ranks make
    the same number of rounds, and a rank that ends early takes part until then.

    Args:
        communicator: The ranks that train together.
        max_staleness: How many steps a rank takes at most since it last sent its parameters.
        interval: The seconds between the end of an average and the start of the next.
    """

    may_diverge = True
    has_diverged = False

    def __init__(self, communicator: CommunicatorBase, max_staleness: int, interval: float) -> None:
        super().__init__(communicator)
        self.is_meeting = False
        self._pace = max_staleness, interval
        self._is_shared = False
        self._reducer: GradientReducer | None = None
        self._worker = Worker()
        self._rounds: list[_Rounds] = []  # at most one; the same list outlives this object
        self._ended_by: Exception | None = None
        weakref.finalize(self, _drop, self._rounds, self._worker).atexit = False
        _all.add(self)
        _see_to_the_end()

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Take a local step, and add a mean if there is a new one."""
        rounds = self._run(model)
        if backward is not None:
            backward(None)
        self.has_diverged = True
        self.is_meeting = rounds.step(take_step)

    def idle(self, model: chainer.Link) -> None:
        """Prepare with the other ranks, whose first step this may be; collective the first time."""
        self._share(model)

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform the ranks that average, or are about to, of an exception; collective with these."""
        if error is self._ended_by:
            return
        if not self._is_shared:
            self._communicator.allgather_obj(describe(error))
            return
        rounds = self._run(model)  # of this rank there may be none, but the others are in them, or will be
        self._rounds.clear()
        rounds.fail()

    def restart(self, model: chainer.Link) -> None:
        """End the current rounds; collective."""
        if self._is_shared:
            self._run(model)  # of this rank there may be none, but the others are in them
        self._stop(restarts=True)
        self._is_shared = self.has_diverged = False
        self._share(model)

    def synchronize(self, model: chainer.Link) -> bool:
        """Wait until all ranks have called this, and continue averaging while others train; collective."""
        self._run(model)
        self._stop()
        self.has_diverged = False
        return False

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Warn if parameters are loaded while copies of others are averaged."""
        if self._rounds and not isinstance(serializer, chainer.Serializer):
            warnings.warn(
                "asynchronous: state is loaded while parameters are averaged, so that means of the former parameters "
                "may be added to those that are loaded: call synchronize() on every rank before",
                RuntimeWarning,
                stacklevel=2,
            )

    def check(self, model: chainer.Link) -> None:
        """Raise on every rank if a link of the model communicates; collective.

        Raises:
            LeftByException: Another rank has left a join because of an exception.
        """
        # A rank that leaves a join by an exception before it has shared the parameters sends it here.
        expect_no_failure(self._communicator.allgather_obj(""))
        with raise_on_all(self._communicator):  # ranks are not in the same step at the same time
            for path, link in communicating_links(model):
                raise ValueError(
                    f"asynchronous: expected a model that does not communicate, got a {type(link).__name__} with a "
                    f"communicator at {path}: ranks take their steps at different times, and would wait for one "
                    "another or mix up their messages; use LocalSGD, or a link that does not communicate, such as "
                    "chainer.links.BatchNormalization"
                )

    def _share(self, model: chainer.Link) -> None:
        """Prepare for a model that all ranks share from now on; collective the first time."""
        if self._is_shared:
            return
        self.check(model)
        if self._reducer is None:  # not earlier: it has its own MPI communicators, whose number is limited
            self._reducer = self._communicator.gradient_reducer(own_dtype=True, apart=True)
        self._is_shared = True

    def _run(self, model: chainer.Link) -> _Rounds:
        """Return the current rounds, or start them; collective the first time."""
        self._share(model)
        if not self._rounds:
            assert self._reducer is not None
            self._rounds.append(_Rounds(model, self._reducer, self._worker, self._communicator.size, self._pace))
        return self._rounds[0]

    def _stop(self, *, restarts: bool = False) -> None:
        """End the rounds, together with those of all ranks; all of them restart, or none."""
        if self._rounds:
            try:
                self._rounds.pop().end(restarts=restarts)
            except Exception as error:
                self._ended_by = error
                raise
            finally:
                self._worker.close()


class _Rounds:
    """Averages a model's parameters in a thread, again and again, until all ranks have ended.

    Args:
        model: The model.
        reducer: Computes the averages, with its own MPI communicators.
        worker: The thread.
        size: The number of ranks.
        pace: How many steps may be taken since the parameters were last sent, and how many seconds to pause between
            two rounds.

    Attributes:
        has_raised: Whether a step has raised the exception that ended the rounds.
    """

    def __init__(
        self, model: chainer.Link, reducer: GradientReducer, worker: Worker, size: int, pace: tuple[int, float]
    ) -> None:
        self._params = initialised_parameters(model)
        self._device = model.device if not self._params else next(iter(self._params.values())).device
        self._reducer = reducer
        self._size = size
        self._max_staleness, self._interval = pace
        # Held while parameters are changed or copied. A thread that waits for it waits for a mean.
        self._changed = threading.Condition()
        self._pending: dict[str, Any] | None = None
        self._steps = self._sent_at = 0
        self._averaged_at = 0
        # A finalizer may put an item into this queue at any time; setting an event would not be safe.
        self._endings: SimpleQueue[None] = SimpleQueue()
        self._has_ended = self._restarts = False
        self._failure: RuntimeError | None = None
        self._is_over = False
        self.has_raised = False
        self._future = Future(self._make_rounds, worker)

    def step(self, take_step: TakeStep) -> bool:
        """Take a step, and add a mean if there is a new one; wait for one if the last one is too old.

        Returns:
            Whether a mean was added.
        """
        with self._changed:
            take_step()
            self._steps += 1
            has_added = self._add()
            while self._steps - self._averaged_at >= self._max_staleness and not self._is_over:
                with waiting_for(lambda: f"a mean of parameters, {self._steps - self._averaged_at} steps old"):
                    self._changed.wait()
                has_added |= self._add()
        if self._is_over:
            self.has_raised = True
            self._future.wait()  # raises the exception that ended the rounds
        return has_added

    def announce_end(self) -> None:
        """Announce that this rank has ended."""
        self._endings.put(None)

    def end(self, *, restarts: bool = False) -> None:
        """Announce that this rank has ended, and wait for all ranks; then all parameters are equal.

        Args:
            restarts: Whether this rank has new parameters, which it will distribute.

        Raises:
            ValueError: Only some ranks restart (on every rank).
        """
        self._restarts = restarts
        self.announce_end()
        self._future.wait()

    def fail(self) -> None:
        """Announce that this rank has failed, and wait until all ranks know."""
        self._failure = RuntimeError(
            "a rank has left join() because of an exception: parameters are no longer averaged"
        )
        self.announce_end()
        with contextlib.suppress(RuntimeError):  # it is raised on this rank, too
            self._future.wait()

    def _add(self) -> bool:
        """Add pending differences to the parameters."""
        if self._pending is None:
            return False
        for name, difference in self._pending.items():
            set_value(self._params[name], _sum(name, value_of(self._params[name]), difference))
        self._pending = None
        return True

    def _make_rounds(self) -> None:
        try:
            with waiting_for(lambda: "parameters, asynchronously"), chainer.using_device(self._device):
                self._listen(0)
                while not self._make_round():
                    self._listen(self._interval)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _listen(self, seconds: float) -> None:
        """Wait for some seconds, unless this rank ends before, or has ended already."""
        if not self._has_ended:
            with contextlib.suppress(Empty):
                self._endings.get(timeout=seconds)
                self._has_ended = True

    def _make_round(self) -> bool:
        """Average a copy of the parameters; collective. Return whether all ranks have ended."""
        try:
            sent = self._copy()
        except Exception as error:
            self._reducer.average(_Failed(error))  # raises on all ranks
            raise
        means = {name: array.copy() for name, array in sent.items()}
        like = next(iter(means.values()), np.zeros(1, np.float32))
        means[_FLAGS] = cuda.get_array_module(like).array([self._has_ended, self._restarts], np.float32)
        average_arrays(self._reducer, means)
        # A mean of ones may be rounded to less than 1.
        ended, restarting = (round(float(flag) * self._size) for flag in means.pop(_FLAGS))
        have_all_ended = ended == self._size
        if have_all_ended and 0 < restarting < self._size:
            raise ValueError(
                f"asynchronous: expected all ranks to have the same parameters, got {restarting} of {self._size} ranks "
                "that distribute them again, for example because only these ranks have added a parameter"
            )
        with self._changed:
            if have_all_ended:
                for name, param in self._params.items():
                    set_value(param, means[name])
                self._pending = None
            else:
                self._note(means, sent)
            self._averaged_at = self._sent_at
            self._changed.notify_all()
        return have_all_ended

    def _copy(self) -> dict[str, Any]:
        """Return a copy of the parameters, including the differences that are still to be added.

        Raises:
            RuntimeError: This rank has failed.
            ValueError: A parameter has changed its shape.
        """
        if self._failure is not None:
            raise self._failure
        with self._changed:
            self._sent_at = self._steps
            sent = {name: value_of(param).copy() for name, param in self._params.items()}
            for name, difference in (self._pending or {}).items():
                sent[name] = _sum(name, sent[name], difference)
        return sent

    def _note(self, means: dict[str, Any], sent: dict[str, Any]) -> None:
        """Schedule the difference between the means and the sent parameters to be added after the next step."""
        for name, mean in means.items():
            mean -= sent[name]
            if self._pending is not None:
                mean += self._pending[name]
        self._pending = means


def _sum(name: str, value: Any, difference: Any) -> Any:
    if value.shape != difference.shape:
        raise ValueError(f"asynchronous: expected {name} to keep its shape {difference.shape}, got {value.shape}")
    total = value.copy()
    total += difference
    return total


class _Failed:
    """A stand-in for a model whose parameters are not available: it tells the other ranks why.

    Args:
        error: The reason.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def namedparams(self) -> Iterator[tuple[str, Any]]:
        """Raise."""
        raise self._error


def _drop(rounds: list[_Rounds], worker: Worker) -> None:
    """End rounds whose optimizer is gone; the rounds of other ranks continue until theirs are gone, too."""
    for each in rounds:
        each.announce_end()
    worker.close(wait=False)


_all: weakref.WeakSet[AsynchronousMean] = weakref.WeakSet()


def _end_all() -> None:
    """End all rounds before the process ends: no rank may leave the others in a round."""
    with contextlib.ExitStack() as stack:  # the thread continues after an exception
        for scheme in list(_all):
            for rounds in scheme._rounds:  # noqa: SLF001 - it is in this file
                if not rounds.has_raised:
                    # Announce all first: the order of waiting may not be the same on all ranks.
                    rounds.announce_end()
                    stack.callback(scheme._stop)  # noqa: SLF001


@functools.cache
def _see_to_the_end() -> None:
    """Register the end of all rounds; after the first worker was made, whose tasks end after the rounds have."""
    at_exit(_end_all)
