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

from mn_comm import CommunicatorBase, raise_on_all
from mn_comm.building_blocks import GradientReducer, Worker, activity, at_exit, waiting_for
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
        self._ended_by: BaseException | None = None
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
        rounds = self._rounds[0] if self._rounds else self._run(model)  # the others are in them, or will be
        rounds.announce_failure()
        with contextlib.suppress(RuntimeError):  # it is raised on this rank, too
            self._await_end()

    def restart(self, model: chainer.Link) -> None:
        """End the current rounds; collective."""
        if self._is_shared:
            self._end(model, restarts=True)
        self._share(model)

    def synchronize(self, model: chainer.Link) -> bool:
        """Wait until all ranks have called this, and continue averaging while others train; collective."""
        self._end(model, restarts=False)
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
        self._rounds.clear()  # they have ended, if a signal handler has raised before they were forgotten
        self.check(model)
        if self._reducer is None:  # not earlier: it has its own MPI communicators, whose number is limited
            self._reducer = self._communicator.gradient_reducer(own_dtype=True, apart=True)
        self._is_shared = True

    def _run(self, model: chainer.Link) -> _Rounds:
        """Return the current rounds, or start them; collective the first time."""
        if self._rounds and self._rounds[0].is_ending:
            self._await_end()
        self._share(model)
        if not self._rounds:
            assert self._reducer is not None
            self._rounds.append(_Rounds(model, self._reducer, self._worker, self._communicator.size, self._pace))
        self._rounds[0].start()
        return self._rounds[0]

    def _end(self, model: chainer.Link, *, restarts: bool) -> None:
        """End the rounds, together with those of all ranks, or continue to wait for that; collective.

        Args:
            model: The model.
            restarts: Whether this rank has new parameters, which it will distribute.

        Raises:
            ValueError: Only some ranks restart (on every rank).
        """
        if not self._rounds or not self._rounds[0].is_ending or self._rounds[0].restarts != restarts:
            self._run(model)  # of this rank there may be none, but the others are in them, or will be
        self._rounds[0].announce_end(restarts)
        self._await_end()

    def _await_end(self) -> None:
        """Wait for the end of the rounds, which has been announced, and only then forget them.

        A signal handler may raise meanwhile. Then the next operation waits again, before any other rounds start.
        """
        (rounds,) = self._rounds
        rounds.wait()
        self._worker.close()
        self._ended_by = rounds.error
        if rounds.error is None:
            self.has_diverged, self._is_shared = False, not rounds.restarts
        self._rounds.clear()
        if rounds.error is not None:
            raise rounds.error


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
        is_ending: Whether this rank has announced its end.
        restarts: Whether it then has new parameters, which it will distribute.
        error: The exception that has ended the rounds.
        has_raised: Whether a step has raised it.
    """

    def __init__(
        self, model: chainer.Link, reducer: GradientReducer, worker: Worker, size: int, pace: tuple[int, float]
    ) -> None:
        self._params = initialised_parameters(model)
        self._device = model.device if not self._params else next(iter(self._params.values())).device
        self._reducer = reducer
        self._worker = worker
        self._size = size
        self._max_staleness, self._interval = pace
        # Held while parameters are changed or copied. No signal handler can leave it locked by raising, as it can a
        # Condition or an Event, whose methods are Python's own code.
        self._changes = threading.Lock()
        self._pending: dict[str, Any] = {}
        self._steps = self._sent_at = 0
        self._averaged_at = 0
        # A finalizer may put an item into this queue at any time; setting an event would not be safe.
        self._endings: SimpleQueue[None] = SimpleQueue()
        self._news: SimpleQueue[None] = SimpleQueue()  # has an item after a round, until it is taken, and at the end
        self._has_started = self._has_ended = self._is_over = False
        self._failure: RuntimeError | None = None
        self.is_ending = self.restarts = False
        self.error: BaseException | None = None
        self.has_raised = False

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if not self._has_started:
            self._worker.put(self._make_rounds, self._note_end)
            self._has_started = True  # a signal handler may raise before: then the second task does nothing

    def step(self, take_step: TakeStep) -> bool:
        """Take a step, and add a mean if there is a new one; wait for one if the last one is too old.

        Returns:
            Whether a mean was added.
        """
        with self._changes:
            take_step()
            self._steps += 1
            has_added = self._add()
            is_late = self._is_late()
        while is_late and not self._is_over:
            with waiting_for(lambda: f"a mean of parameters, {self._steps - self._averaged_at} steps old"):
                self._await_news()
            with self._changes:
                has_added |= self._add()
                is_late = self._is_late()
        if self.error is not None:
            self.has_raised = True
            raise self.error
        return has_added

    def announce_end(self, restarts: bool = False) -> None:
        """Announce that this rank has ended, maybe again.

        Args:
            restarts: Whether this rank has new parameters, which it will distribute.
        """
        self.start()
        self.restarts |= restarts
        self.is_ending = True
        self._endings.put(None)

    def announce_failure(self) -> None:
        """Announce that this rank has failed, which ends the rounds on all ranks."""
        self._failure = RuntimeError(
            "a rank has left join() because of an exception: parameters are no longer averaged"
        )
        self.announce_end()

    def wait(self) -> None:
        """Wait until all ranks have ended; then all parameters are equal, unless there is an error."""
        while not self._is_over:
            self._await_news()

    def _await_news(self) -> None:
        activity().wait_for_thread(self._news.get)
        if self._is_over:
            self._news.put(None)  # another thread may wait

    def _is_late(self) -> bool:
        return self._steps - self._averaged_at >= self._max_staleness

    def _add(self) -> bool:
        """Add pending differences to the parameters, each of them once, even if there is an exception between two."""
        names = list(self._pending)
        for name in names:
            set_value(self._params[name], _sum(name, value_of(self._params[name]), self._pending[name]))
            del self._pending[name]
        return bool(names)

    def _make_rounds(self) -> None:
        if self._is_over:
            return
        try:
            with waiting_for(lambda: "parameters, asynchronously"), chainer.using_device(self._device):
                self._listen(0)
                while not self._make_round():
                    self._listen(self._interval)
        except BaseException as error:
            self.error = error

    def _note_end(self) -> None:
        self._is_over = True
        self._news.put(None)

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
        means[_FLAGS] = cuda.get_array_module(like).array([self._has_ended, self.restarts], np.float32)
        average_arrays(self._reducer, means)
        # A mean of ones may be rounded to less than 1.
        ended, restarting = (round(float(flag) * self._size) for flag in means.pop(_FLAGS))
        have_all_ended = ended == self._size
        if have_all_ended and 0 < restarting < self._size:
            raise ValueError(
                f"asynchronous: expected all ranks to have the same parameters, got {restarting} of {self._size} ranks "
                "that distribute them again, for example because only these ranks have added a parameter"
            )
        with self._changes:
            if have_all_ended:
                for name, param in self._params.items():
                    set_value(param, means[name])
                self._pending = {}
            else:
                self._note(means, sent)
            self._averaged_at = self._sent_at
        if self._news.empty():
            self._news.put(None)
        return have_all_ended

    def _copy(self) -> dict[str, Any]:
        """Return a copy of the parameters, including the differences that are still to be added.

        Raises:
            RuntimeError: This rank has failed.
            ValueError: A parameter has changed its shape.
        """
        if self._failure is not None:
            raise self._failure
        with self._changes:
            self._sent_at = self._steps
            sent = {name: value_of(param).copy() for name, param in self._params.items()}
            for name, difference in self._pending.items():
                sent[name] = _sum(name, sent[name], difference)
        return sent

    def _note(self, means: dict[str, Any], sent: dict[str, Any]) -> None:
        """Schedule the difference between the means and the sent parameters to be added after the next step."""
        for name, mean in means.items():
            mean -= sent[name]
            if name in self._pending:
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
                    stack.callback(scheme._await_end)  # noqa: SLF001


@functools.cache
def _see_to_the_end() -> None:
    """Register the end of all rounds; after the first worker was made, whose tasks end after the rounds have."""
    at_exit(_end_all)
