"""Which ranks of a join() have data: the messages that the ranks exchange about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class Everyone(Exception):
    """Raised on all ranks when the last one has left the join."""


class NeedsParameters(Exception):
    """Raised on all ranks when those that have data need the parameters to be distributed before a step."""


class LeftByException(RuntimeError):
    """Raised on the other ranks when one has left the block of a join because of an exception."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} has left join() because of an exception: {what}")


def describe(error: Exception) -> str:
    """Return the text by which ranks learn of an exception on another rank."""
    return f"{type(error).__name__}: {error}"


def expect_no_failure(failures: Iterable[str]) -> None:
    """Raise LeftByException if a rank has sent the exception because of which it has left.

    Args:
        failures: The exceptions of all ranks; empty for ranks that have not failed.
    """
    for rank, failure in enumerate(failures):
        if failure:
            raise LeftByException(rank, failure)


@dataclass
class Message:
    """A message from a rank to the others.

    Attributes:
        over: What means are over.
        needs_parameters: Whether it needs the parameters to be distributed, before it takes a step.
        is_absent: Whether it has no data.
        has_left: Whether it has left the block of the join.
        failure: The exception because of which it leaves; otherwise empty.
        specimen: A sample with which the model is called, for ranks that have never called it.
        hyperparameters: Those of its optimizer; if it has no data, those of the first rank that has: a script may
            change them in a loop that this rank has left.
    """

    over: str
    needs_parameters: bool = False
    is_absent: bool = False
    has_left: bool = False
    failure: str = ""
    specimen: Any = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)


class JoinState:
    """Which ranks of a join have data; see :class:`mn_comm.building_blocks.JoinMessages` for how messages travel.

    Args:
        rank: This rank.
        size: How many ranks there are.
        over: What means are over: ``"present"`` for the ranks that have data, or ``"all"``.

    Attributes:
        message: The message of this rank.
        is_together: Whether this rank is in the middle of something that all ranks do together.
    """

    def __init__(self, rank: int, size: int, over: str) -> None:
        self.message = Message(over)
        self.is_together = False
        self._told: dict[str, Any] = {}
        self._rank = rank
        self._size = size
        self._absent: frozenset[int] = frozenset()

    @property
    def has_news(self) -> bool:
        """Whether this rank has a message that the other ranks do not know yet."""
        mine = self.message
        has_changed = bool(self._absent) and not mine.is_absent and mine.hyperparameters != self._told
        is_urgent = mine.needs_parameters or mine.failure != ""
        return is_urgent or mine.is_absent != (self._rank in self._absent) or has_changed

    @property
    def factor(self) -> float:
        """The factor for a mean over all ranks; 0 if no rank has data."""
        n_present = self._size - len(self._absent)
        return self._size / n_present if n_present and self.message.over == "present" else float(bool(n_present))

    def receive(self, messages: Sequence[Message]) -> None:
        """Process the messages of all ranks.

        Raises:
            LeftByException: A rank has left because of an exception (on the others).
            RuntimeError: Parameters have changed on some ranks that have data, and not on others (on all).
            ValueError: Ranks want means over different ranks (on all).
            Everyone: All ranks have left (on all).
            NeedsParameters: Parameters must be distributed (on all).
        """
        mine, self._told = self.message, messages[self._rank].hyperparameters
        has_failed, mine.failure, mine.needs_parameters = mine.failure != "", "", False
        if mine.is_absent:
            present = (message.hyperparameters for message in messages if not message.is_absent)
            mine.hyperparameters = next(present, mine.hyperparameters)
        self._absent = frozenset(rank for rank, message in enumerate(messages) if message.is_absent)
        if has_failed:
            return
        expect_no_failure(message.failure for message in messages)
        for rank, message in enumerate(messages):
            if message.over != messages[0].over:
                raise ValueError(
                    f"expected the same over of join() on every rank, got {messages[0].over!r} on rank 0 and "
                    f"{message.over!r} on rank {rank}"
                )
        if mine.specimen is None:
            mine.specimen = next((message.specimen for message in messages if message.specimen is not None), None)
        if all(message.has_left for message in messages):
            raise Everyone
        self._expect_same_need(messages)

    def _expect_same_need(self, messages: Sequence[Message]) -> None:
        present = [(rank, message.needs_parameters) for rank, message in enumerate(messages) if not message.is_absent]
        sharing = [rank for rank, needs_parameters in present if needs_parameters]
        others = [rank for rank, needs_parameters in present if not needs_parameters]
        if sharing and others:
            raise RuntimeError(
                f"expected the parameters of all ranks to change together, but parameters of rank {sharing[0]} "
                f"have been added, renamed or initialised, and those of rank {others[0]} have not"
            )
        if sharing:
            raise NeedsParameters

    @contextmanager
    def together(self) -> Iterator[None]:
        """Mark a block as something that all ranks do together; an exception leaves it marked.

        If such a block raises, the other ranks are informed in the block itself, or cannot be informed at all.
        """
        self.is_together = True
        yield
        self.is_together = False
