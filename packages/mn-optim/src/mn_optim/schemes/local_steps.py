"""Local steps between meetings: local SGD, DiLoCo and Streaming DiLoCo, which all use the same mechanism.

Local SGD is DiLoCo with SGD and a learning rate of 1 as the outer optimizer; DiLoCo is Streaming DiLoCo with one
fragment, no delay and ``alpha=1``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np

from mn_comm import CommunicatorBase, raise_on_all
from mn_comm.building_blocks import CompressionReport, waiting_for
from mn_optim.join_state import describe, expect_no_failure
from mn_optim.schemes.arrays import average_state_of
from mn_optim.schemes.fragment import Average, Fragment, cut
from mn_optim.schemes.parameters import initialised_parameters, share_out, value_of
from mn_optim.schemes.scheme import Backward, Scheme, TakeStep
from mn_optim.serialized import read

_FAILURE, _SHARE, _SYNCHRONIZE = -3, -2, -1


class _Message(NamedTuple):
    """A rank's message before parameters are exchanged.

    Attributes:
        purpose: The fragment that is to meet, or ``_SYNCHRONIZE``, ``_SHARE`` or ``_FAILURE``.
        moved: For each fragment, whether this rank has changed it since its last meeting.
        frozen: The names of parameters that its optimizer does not update now.
        failure: The exception because of which it has left a join.
    """

    purpose: int
    moved: tuple[bool, ...]
    frozen: tuple[str, ...]
    failure: str = ""

    def has_moved(self, index: int) -> bool:
        """Return whether this rank has changed a fragment since its last meeting."""
        return index < len(self.moved) and self.moved[index]


class LocalSteps(Scheme):
    """Each rank takes local steps, and fragments of the model are exchanged every few steps.

    Before each meeting, every rank sends a short message with the purpose of the meeting. A rank that has no more steps
    to take waits in :meth:`synchronize`, and takes part in the meetings of the others until all ranks have called it.

    Args:
        communicator: The ranks that train together.
        steps: How many steps there are between two meetings of a fragment.
        outer: The outer optimizer, which is copied.
        fragments: How many fragments there are.
        delay: How many steps an exchange may take.
        alpha: The share of the common parameters in a rank's new parameters.
        average_state: Whether the actual optimizer's state is averaged as well.
        sends: What ``gradient_reducer`` is told about how the changes are sent; empty for exact means.
    """

    may_diverge = True

    def __init__(
        self,
        communicator: CommunicatorBase,
        steps: int,
        outer: chainer.Optimizer,
        *,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 1.0,
        average_state: bool = False,
        sends: Mapping[str, Any],
    ) -> None:
        super().__init__(communicator)
        self.is_meeting = False
        self.share_of_meeting = 1 / fragments
        self._steps = steps
        self._outer = outer
        self._n_fragments = fragments
        self._delay = delay
        self._alpha = alpha
        # Without reducers, the communicator itself averages: it may be of the script's own class.
        n_reducers = fragments if delay or sends else 0
        self._reducers = [communicator.gradient_reducer(background=delay > 0, **sends) for _ in range(n_reducers)]
        self._state_reducer = communicator.gradient_reducer(own_dtype=True) if average_state else None
        self._position = 0
        self._fragments: list[Fragment] = []
        self._landed: list[int] = []

    @property
    def compression_report(self) -> CompressionReport | None:
        """The report of the fragments whose means arrived in the latest step; ``None`` without compression."""
        reports = [report for each in self._reducers if (report := each.compression_report) is not None]
        if not reports:
            return None
        sent = sum(reports[index].bytes_sent for index in self._landed)
        plain = sum(each.bytes_sent / each.ratio for each in reports)
        ratio = sum(each.bytes_sent for each in reports) / plain if plain else 1.0
        return CompressionReport(sent, ratio, float(np.hypot.reduce([each.error_norm for each in reports])))

    @property
    def has_diverged(self) -> bool:
        """Whether a fragment has changed since its last meeting, or its mean is pending."""
        return any(each.has_moved or each.due is not None for each in self._fragments)

    def step(self, model: chainer.Link, backward: Backward | None, take_step: TakeStep) -> None:
        """Take a local step, and meet if it is time to; collective in that case."""
        self._landed.clear()
        self._use_fragments(model)
        self._land_due()
        if backward is not None:
            backward(None)
        for fragment in self._fragments:
            fragment.has_moved = True  # before: a hook after the update may fail
        take_step()
        self._advance(model)

    def idle(self, model: chainer.Link) -> None:
        """Count a step without changing parameters, and meet if it is time to; collective in that case."""
        self._use_fragments(model)
        self._land_due()
        self._advance(model)

    def fail(self, model: chainer.Link, error: Exception) -> None:
        """Inform all ranks that meet, or wait for meetings, of an exception; collective with these."""
        self._exchange_messages(_FAILURE, describe(error))

    def _advance(self, model: chainer.Link) -> None:
        self._position += 1
        self.is_meeting = False
        for fragment in self._fragments:
            if self._is_time(fragment):
                self._meet(model, fragment.index)
        self._land_due()

    def restart(self, model: chainer.Link) -> None:
        """Wait for pending exchanges, and discard them; collective."""
        messages = self._exchange_messages(_SHARE)
        if any(message.purpose >= 0 for message in messages):
            raise _mismatch(messages)
        self._forget()

    def synchronize(self, model: chainer.Link) -> bool:
        """Take part in the meetings of others until all ranks are here, then meet with all fragments; collective."""
        has_shared = False
        self._landed.clear()
        while True:
            messages = self._exchange_messages(_SYNCHRONIZE)
            purposes = {message.purpose for message in messages} - {_SYNCHRONIZE}
            if len(purposes) > 1:
                raise _mismatch(messages)
            if not purposes:
                self._meet_in_all(model, messages)
                return has_shared
            has_shared |= self._take_part(model, purposes.pop(), messages)

    def _take_part(self, model: chainer.Link, purpose: int, messages: Sequence[_Message]) -> bool:
        """Take part in the others' meeting; collective. Return whether its purpose was to distribute parameters."""
        if purpose == _SHARE:
            share_out(self._communicator, model, fills_in=self.join is not None)
            self._forget()
            return True
        self._use_fragments(model)
        self._land(self._fragments)  # the others have landed what this rank still waits for
        self._exchange(model, purpose, messages)
        self._land(self._fragments)
        return False

    def _meet_in_all(self, model: chainer.Link, messages: Sequence[_Message]) -> None:
        """Make all parameters equal; collective."""
        self._use_fragments(model)  # others may have taken local steps although this rank has not
        self._land(self._fragments)
        for fragment in self._fragments:
            if self._exchange(model, fragment.index, messages):
                self._land([fragment], alpha=1)
        self._position = 0

    def serialize(self, serializer: Any, model: chainer.Link) -> None:
        """Save or load the position between meetings, the common parameters, and pending exchanges; not collective."""
        mine = serializer["multi_node_local_steps"]
        if isinstance(serializer, chainer.Serializer):
            mine("position", np.array([self._position]))
            mine("cut", self._cut())
            for name, common in (each for fragment in self._fragments for each in fragment.common):
                mine["common"](name, common.data)
        elif not self._load(mine, model):
            return
        for fragment in self._fragments:
            fragment.serialize(mine[f"fragment_{fragment.index}"])

    def _load(self, mine: Any, model: chainer.Link) -> bool:
        position = read(mine, "position")
        if position is None:
            self._forget()
            return False
        self._position = int(position[0])
        params = dict(model.namedparams())  # uninitialised parameters are about to be loaded
        saved = {name: read(mine["common"], name) for name in params}
        common = {name: params[name].device.send(array) for name, array in saved.items() if array is not None}
        lacking = [name for name in initialised_parameters(model) if name not in common]
        self._make_fragments(params, {} if lacking else common)
        if not lacking and np.array_equal(read(mine, "cut"), self._cut()):
            return True
        if common:
            self._begin_anew()
        for reducer in self._reducers:
            reducer.load_state({})
        return False

    def _cut(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return, as an array, the properties that must match for a snapshot's fragment state to be loaded."""
        names = [[name for name, _ in fragment.common] for fragment in self._fragments]
        return np.frombuffer(json.dumps([type(self._outer).__name__, names]).encode(), np.uint8)

    def _begin_anew(self) -> None:
        """Discard all state except the common parameters; not collective."""
        self._position = 0
        for fragment in self._fragments:
            fragment.has_moved = True  # maybe
        if self._communicator.rank == 0:
            warnings.warn(
                "local steps: the state of the outer optimizer is reset: the parameters, their fragments, or the class "
                "of the outer optimizer have changed since it was saved",
                stacklevel=2,
            )

    def _use_fragments(self, model: chainer.Link) -> None:
        """Create fragments, with the model's current parameters as the common ones, unless there are fragments."""
        if not self._fragments:
            params = initialised_parameters(model)
            self._make_fragments(params, {name: value_of(param) for name, param in params.items()})

    def _make_fragments(self, params: Mapping[str, chainer.Parameter], arrays: Mapping[str, Any]) -> None:
        self._fragments = []
        for index, names in enumerate(cut(arrays, self._n_fragments)):
            reducer = self._reducers[index] if self._reducers else None
            average: Average = self._communicator.multi_node_mean_grad
            if reducer is not None:
                average = reducer.start if self._delay else reducer.average
            named = [(name, params[name]) for name in names]
            self._fragments.append(Fragment(index, named, arrays, self._outer, average, reducer))

    def _is_time(self, fragment: Fragment) -> bool:
        first = self._steps * (fragment.index + 1) // len(self._fragments)
        return self._position >= first and (self._position - first) % self._steps == 0

    def _meet(self, model: chainer.Link, index: int) -> None:
        messages = self._exchange_messages(index)
        if any(message.purpose not in (index, _SYNCHRONIZE) for message in messages):
            raise _mismatch(messages)
        self.is_meeting = self._exchange(model, index, messages)

    def _exchange(self, model: chainer.Link, index: int, messages: Sequence[_Message]) -> bool:
        """Send this rank's change of a fragment, unless no rank has changed it; collective. Return whether one has.

        A rank without a change does not count.
        """
        movers = [message for message in messages if message.has_moved(index)]
        if not movers:
            return False
        scale = len(messages) / len(movers)
        fragment = self._fragments[index]
        has_moved = fragment.has_moved
        with raise_on_all(self._communicator):
            fragment.measure(scale)
        held = set.intersection(*(set(message.frozen) for message in movers))
        fragment.launch(self._position + self._delay, held)
        if self._state_reducer is not None:
            average_state_of(model, self._state_reducer, has_moved, scale)
        return True

    def _land_due(self) -> None:
        """Land what is due at this position; before a step, there is only what a signal handler has interrupted."""
        self._land(each for each in self._fragments if each.due is not None and each.due <= self._position)

    def _land(self, fragments: Iterable[Fragment], alpha: float | None = None) -> None:
        for fragment in fragments:
            if fragment.due is not None:
                fragment.land(self._alpha if alpha is None else alpha)
                self._landed.append(fragment.index)

    def _forget(self) -> None:
        for fragment in self._fragments:
            fragment.forget()
        self._fragments = []
        self._position = 0

    def _exchange_messages(self, purpose: int, failure: str = "") -> list[_Message]:
        """Exchange the messages of all ranks before a meeting, and return them; collective.

        Raises:
            LeftByException: Another rank has left a join because of an exception.
        """
        # The changes that a rank makes while a mean is pending survive its arrival only if alpha is below 1.
        moved = tuple(self._alpha != 1 if each.due is not None else each.has_moved for each in self._fragments)
        mine = (purpose, moved, tuple(name for each in self._fragments for name in each.frozen), failure)
        with waiting_for(lambda: "a meeting of local steps"):
            messages = [_Message(*each) for each in self._communicator.allgather_obj(mine)]
        if purpose != _FAILURE:
            expect_no_failure(message.failure for message in messages)
        return messages


def _mismatch(messages: Sequence[_Message]) -> RuntimeError:
    names = {_SHARE: "the distribution of parameters", _SYNCHRONIZE: "synchronize()"}
    found = ", ".join(
        f"rank {rank} came to {names.get(message.purpose, f'the meeting of fragment {message.purpose}')}"
        for rank, message in enumerate(messages)
    )
    return RuntimeError(
        f"expected all ranks to come to the same meeting, but {found}: did all call synchronize() at the same step?"
    )
