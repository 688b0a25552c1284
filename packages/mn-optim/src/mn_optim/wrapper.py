"""What a multi-node optimizer does besides taking steps: it passes attributes on, synchronizes, saves and loads."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import chainer

from mn_comm import CommunicatorBase
from mn_comm.building_blocks import CompressionReport, Model
from mn_optim.schemes.scheme import Scheme, Stepper

_OF_THE_STEPPER = ("actual_optimizer", "communicator", "target_params")


def expect_optimizer(actual_optimizer: Any) -> None:
    """Raise TypeError unless an object is an optimizer, as far as it will be used."""
    if isinstance(actual_optimizer, type) or not (
        hasattr(actual_optimizer, "setup") and hasattr(actual_optimizer, "update")
    ):
        raise TypeError(
            "expected a chainer.Optimizer for actual_optimizer, or an object with setup, update and target; got "
            f"{type(actual_optimizer).__name__}: {actual_optimizer!r:.80}"
        )


class OptimizerWrapper:
    """A multi-node optimizer without its steps: the base class of :class:`mn_optim.MultiNodeOptimizer`.

    All attributes except its own methods, and its own attributes in ``__slots__``, are those of the actual optimizer.
    """

    __slots__ = ("__weakref__", "_accumulates", "_commits", "_participant", "_stepper")

    _stepper: Stepper
    actual_optimizer: chainer.Optimizer
    communicator: CommunicatorBase
    target_params: list[tuple[str, bool]]

    @property
    def zero_fill(self) -> bool:
        """Whether an initialised parameter without a gradient counts as one of zeros."""
        return self._stepper.scheme.zero_fill

    @property
    def compression_report(self) -> CompressionReport | None:
        """The effect of compression in the last step on this rank; ``None`` without compression.

        With local steps, nothing is sent in a step without a meeting.
        """
        return self._stepper.scheme.compression_report

    def assume_synchronized(self) -> None:
        """Assume that the parameters of all ranks are equal already: the next update takes a step.

        Call it on every rank, after the same snapshot was loaded on all of them.
        """
        self._stepper.assume_synchronized()

    @property
    def is_meeting(self) -> bool:
        """Whether ranks exchanged data in the latest step; always true without local or asynchronous steps."""
        return self._stepper.scheme.is_meeting

    @property
    def share_of_meeting(self) -> float:
        """The share of the model that ranks exchange in a meeting; below 1 with several fragments."""
        return self._stepper.scheme.share_of_meeting

    @property
    def may_diverge(self) -> bool:
        """Whether the ranks' parameters may differ between two steps, with local or asynchronous steps."""
        return self._stepper.scheme.may_diverge

    def synchronize(self) -> None:
        """Make the parameters of all ranks equal, after local or asynchronous steps; collective.

        A rank that has called this takes part in the meetings of the others until all ranks have called it. It is
        called when Chainer's trainer ends; multi-node evaluators, checkpointers and snapshots call it before they
        begin. In your own training loop, call it before you evaluate or save, and at the end.

        Raises:
            RuntimeError: No model was set up; or another rank came to a different meeting (on every rank).
        """
        self._stepper.synchronize()

    def serialize(self, serializer: Any) -> None:
        """Save or load the state of the actual optimizer, of pending exchanges, and of compression.

        Not collective. Plain Chainer ignores the latter two; if they are missing, they count as empty. Sharded state is
        saved as if it were not sharded, after :meth:`consolidate`.

        Raises:
            RuntimeError: The state is sharded and is to be saved, without :meth:`consolidate` before.
        """
        scheme = self._stepper.scheme
        if self.actual_optimizer.target is not None:
            self._serialize_scheme(scheme, serializer)
        # After the scheme, which knows whether the state is sharded in its present phase.
        (scheme.shards or self.actual_optimizer).serialize(serializer)

    def _serialize_scheme(self, scheme: Scheme, serializer: Any) -> None:
        if isinstance(serializer, chainer.Serializer) and scheme.has_diverged:
            warnings.warn(
                f"the parameters of rank {self.communicator.rank} are saved while those of other ranks differ: call "
                "synchronize() on every rank before, or save by create_multi_node_checkpointer or multi_node_snapshot",
                RuntimeWarning,
                stacklevel=2,
            )
        scheme.serialize(serializer, self.actual_optimizer.target)

    def consolidate(self, to: int = 0) -> None:
        """Gather sharded state on one rank, which can save it until the next ``update``; collective.

        Without sharded state, this does nothing, so a script may call it before every snapshot::

            optimizer.consolidate()
            if comm.rank == 0:
                chainer.serializers.save_npz("optimizer.npz", optimizer)

        ``multi_node_snapshot`` calls it. The multi-node checkpointer does not need it: each rank saves its own part.

        Args:
            to: The rank on which to gather it, the same on every rank.

        Raises:
            RuntimeError: No model was set up.
            ValueError: ``to`` is not a rank, or ranks pass different ones, or have not loaded state equally often (on
                every rank).
        """
        self._stepper.model("consolidate")
        shards = self._stepper.scheme.shards
        if shards is not None:
            shards.consolidate(to)

    def own_part(self) -> AbstractContextManager[None]:
        """Return a context in which :meth:`serialize` saves only this rank's part of sharded state.

        For checkpoints of all ranks together; they can be loaded only by the same number of ranks.
        """
        shards = self._stepper.scheme.shards
        return nullcontext() if shards is None else shards.own_part()

    def is_changed(self, target: Model) -> bool:
        """Return whether the names of a model's parameters, or which are initialised, differ from the last call.

        The first call returns ``True`` for any model that has parameters.
        """
        return self._stepper.is_changed(target)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *_OF_THE_STEPPER, *dir(self._stepper.actual_optimizer)})

    def __getattr__(self, name: str) -> Any:
        if name in OptimizerWrapper.__slots__:  # not set yet: while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._stepper if name in _OF_THE_STEPPER else self._stepper.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OptimizerWrapper.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._stepper if name in _OF_THE_STEPPER else self._stepper.actual_optimizer, name, value)
