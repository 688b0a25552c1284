"""What a loss is told by: an object for those who go on, an exception for those who can't."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Change", "RankLost"]


@dataclass(frozen=True)
class Change:
    """What has become of an elastic communicator.

    Attributes:
        generation: How often it has been rebuilt.
        lost: The ranks that are gone, by their numbers before, in ascending order.
        survivors: The ranks that go on, by their numbers before: the one at position ``i`` is rank ``i`` now.
        rank: This rank's number now.
        seconds: How long it took from the moment this rank knew of the loss.
    """

    generation: int
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    rank: int
    seconds: float

    @property
    def size(self) -> int:
        """How many ranks there are now."""
        return len(self.survivors)

    @property
    def old_rank(self) -> int:
        """This rank's number before."""
        return self.survivors[self.rank]

    @property
    def old_size(self) -> int:
        """How many ranks there were before."""
        return len(self.survivors) + len(self.lost)

    def __str__(self) -> str:
        names = f"rank{'s' * (len(self.lost) > 1)} {', '.join(map(str, self.lost))}" if self.lost else "no rank"
        return f"lost {names} of {self.old_size}, {self.size} go on"


class RankLost(RuntimeError):
    """A rank was lost in an operation that cannot be repeated; raised on every rank that is left.

    The communicator is rebuilt already.

    Args:
        operation: What it was.
        change: What has become of the communicator.
    """

    def __init__(self, operation: str, change: Change) -> None:
        super().__init__(f"{operation}: {change}; the communicator can be used again, but nothing has come of this")
        self.change = change
