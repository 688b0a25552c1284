"""Which ranks of a join() have data: the messages that the ranks exchange about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["OVER", "Everyone", "JoinState", "LeftByException", "NeedsParameters"]

OVER = ("present", "all")
"""The ranks that a mean may be over: those that have data, or all."""

_STEP, _SHARE, _FAILURE = "step", "share", "failure"


class Everyone(Exception):
    """Raised on all ranks when the last one has left the join."""


class NeedsParameters(Exception):
    """Raised on all ranks when those that have data need the parameters to be distributed before a step."""


class LeftByException(RuntimeError):
    """Raised on the other ranks when one has left the block of a join because of an exception."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} has left join() because of an exception: {what}")


class Message(NamedTuple):
    """A message from a rank to the others.

    Attributes:
        kind: What it is about to do.
        is_absent: Whether it has no data.
        has_left: Whether it has left the block of the join.
        over: What means are over.
        detail: The failure; or a sample with which the model is called.
        hyperparameters: Those of its optimizer.
    """

    kind: str
    is_absent: bool
    has_left: bool
    over: str
    detail: Any
    hyperparameters: dict[str, Any]


class JoinState:
    """Which ranks of a join have data; see :class:`mn_comm.building_blocks.JoinMessages` for how messages travel.

    Args:
        rank: This rank.
        size: How many ranks there are.
        over: What means are over, one of :data:`OVER`.

    Attributes:
        is_absent: Whether this rank has no data.
        has_left: Whether this rank has left the block of the join.
        specimen: A sample with which the model is called, for ranks that have never called it.
        is_together: Whether this rank is in the middle of something that all ranks do together.
        hyperparameters: The hyperparameters of this rank's optimizer, or, if it has no data, of the first rank that
            has: a script may change them in a loop that this rank has left.
    """

    def __init__(self, rank: int, size: int, over: str) -> None:
        self.is_absent = self.has_left = self.is_together = False
        self.specimen: Any = None
        self.hyperparameters: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._rank = rank
        self._size = size
        self._over = over
        self._kind = _STEP
        self._failure = ""
        self._absent: frozenset[int] = frozenset()

    @property
    def has_news(self) -> bool:
        """Whether this rank has a message that the other ranks do not know yet."""
        has_changed = bool(self._absent) and not self.is_absent and self.hyperparameters != self._told
        return self._kind != _STEP or self.is_absent != (self._rank in self._absent) or has_changed

    @property
    def message(self) -> Message:
        """The message of this rank."""
        detail = self._failure if self._kind == _FAILURE else self.specimen
        return Message(self._kind, self.is_absent, self.has_left, self._over, detail, self.hyperparameters)

    @property
    def factor(self) -> float:
        """The factor for a mean over all ranks; 0 if no rank has data."""
        n_present = self._size - len(self._absent)
        return self._size / n_present if n_present and self._over == "present" else float(bool(n_present))

    def receive(self, messages: Sequence[Message]) -> None:
        """Process the messages of all ranks.

        Raises:
            LeftByException: A rank has left because of an exception (on the others).
            RuntimeError: Parameters have changed on some ranks that have data, and not on others (on all).
            ValueError: Ranks want means over different ranks (on all).
            Everyone: All ranks have left (on all).
            NeedsParameters: Parameters must be distributed (on all).
        """
        mine = messages[self._rank]
        self._told = mine.hyperparameters
        if self.is_absent:
            present = (message.hyperparameters for message in messages if not message.is_absent)
            self.hyperparameters = next(present, self.hyperparameters)
        self._kind = _STEP
        self._absent = frozenset(rank for rank, message in enumerate(messages) if message.is_absent)
        if mine.kind == _FAILURE:
            return
        for rank, message in enumerate(messages):
            if message.kind == _FAILURE:
                raise LeftByException(rank, message.detail)
            if message.over != messages[0].over:
                raise ValueError(
                    f"expected the same over of join() on every rank, got {messages[0].over!r} on rank 0 and "
                    f"{message.over!r} on rank {rank}"
                )
        if self.specimen is None:
            self.specimen = next((message.detail for message in messages if message.detail is not None), None)
        if all(message.has_left for message in messages):
            raise Everyone
        self._expect_one_kind(messages)

    def _expect_one_kind(self, messages: Sequence[Message]) -> None:
        kinds = {rank: message.kind for rank, message in enumerate(messages) if not message.is_absent}
        if _SHARE in kinds.values():
            for rank, kind in kinds.items():
                if kind != _SHARE:
                    sharing = next(rank for rank, kind in kinds.items() if kind == _SHARE)
                    raise RuntimeError(
                        f"expected the parameters of all ranks to change together, but parameters of rank {sharing} "
                        f"have been added, renamed or initialised, and those of rank {rank} have not"
                    )
            raise NeedsParameters

    def ask_for_parameters(self) -> None:
        """Make this rank's next message a request to distribute parameters."""
        self._kind = _SHARE

    def fail(self, error: Exception) -> None:
        """Make this rank's next message that it has left because of an exception."""
        self._kind, self._failure = _FAILURE, f"{type(error).__name__}: {error}"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Mark a block as something that all ranks do together; an exception leaves it marked.

        If such a block raises, the other ranks are informed in the block itself, or cannot be informed at all.
        """
        self.is_together = True
        yield
        self.is_together = False
