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
        set_aside: The ranks that wait as spares from now on, by their numbers before, in ascending order.
        newcomers: Spares that have joined, by their names in messages. Their numbers follow those of the survivors. For
            a spare itself, which has a number from the set-up, all are survivors.
    """

    generation: int
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    rank: int
    seconds: float
    set_aside: tuple[int, ...] = ()
    newcomers: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many ranks there are now."""
        return len(self.survivors) + len(self.newcomers)

    @property
    def old_rank(self) -> int:
        """This rank's number before."""
        return self.survivors[self.rank]

    @property
    def old_size(self) -> int:
        """How many ranks there were before."""
        return len(self.survivors) + len(self.lost) + len(self.set_aside)

    def __str__(self) -> str:
        if self.newcomers:
            lost = f"lost {_named(self.lost)}, " if self.lost else ""
            return f"{lost}{', '.join(self.newcomers)} joined {len(self.survivors)} ranks, {self.size} go on"
        if self.set_aside:
            lost = f"lost {_named(self.lost)}, " if self.lost else ""
            return f"{lost}{_named(self.set_aside)} of {self.old_size} set aside as spares, {self.size} go on"
        return f"lost {_named(self.lost)} of {self.old_size}, {self.size} go on"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"


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
