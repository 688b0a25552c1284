"""Descriptions of a loss: an object for code that can continue, and an exception for code that cannot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """How an elastic communicator has changed.

    Attributes:
        generation: How often it has been rebuilt.
        lost: The old numbers of the ranks that are lost, in ascending order.
        survivors: The old numbers of the ranks that continue: the one at position ``i`` is now rank ``i``.
        rank: The new number of this rank.
        seconds: The time since this rank learned of the loss.
        set_aside: The old numbers of the ranks that wait as spares from now on, in ascending order.
        newcomers: The names, as in messages, of spares that have joined. Their numbers follow those of the survivors.
            On a spare that joins, all ranks are survivors, and their old numbers are those of the set-up.
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
        """The new number of ranks."""
        return len(self.survivors) + len(self.newcomers)

    @property
    def old_rank(self) -> int:
        """The old number of this rank."""
        return self.survivors[self.rank]

    @property
    def old_size(self) -> int:
        """The old number of ranks."""
        return len(self.survivors) + len(self.lost) + len(self.set_aside)

    def __str__(self) -> str:
        if self.newcomers:
            lost = f"lost {_named(self.lost)}, " if self.lost else ""
            others = "rank" if len(self.survivors) == 1 else "ranks"
            return f"{lost}{', '.join(self.newcomers)} joined {len(self.survivors)} {others}, {self.size} continue"
        if self.set_aside:
            lost = f"lost {_named(self.lost)}, " if self.lost else ""
            return f"{lost}{_named(self.set_aside)} of {self.old_size} set aside as spares, {self.size} continue"
        return f"lost {_named(self.lost)} of {self.old_size}, {self.size} continue"


def _named(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "no rank"


class RankLost(RuntimeError):
    """A rank was lost in an operation that cannot be repeated; raised on every remaining rank.

    The communicator has already been rebuilt; ``change`` says how it has changed.
    """

    def __init__(self, operation: str, change: Change) -> None:
        super().__init__(f"{operation}: {change}; the communicator can be used again, but nothing has come of this")
        self.change = change
