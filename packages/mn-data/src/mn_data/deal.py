"""Which samples are dealt next: a stream of epochs, each in its own order, and samples that were given back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

_Positions = np.ndarray[Any, np.dtype[np.int64]]


class Deal:
    """Deals the samples of a dataset, each once per epoch, in portions of any size.

    It is independent of ranks: all ranks make the same calls, and get the same results. A *position* counts samples
    from the first sample of the first epoch.

    Args:
        length: How many samples there are, above 0.
        seed: The seed for the orders; ``None`` for the order of the dataset.

    Attributes:
        returned: Positions that were given back; they are dealt next.
    """

    def __init__(self, length: int, seed: int | None) -> None:
        self.length = length
        self.seed = seed
        self.returned: _Positions = np.zeros(0, np.int64)
        self._next = 0
        # Two epochs, because a batch may extend across the end of an epoch.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    @property
    def dealt(self) -> int:
        """How many samples have been dealt and not been given back."""
        return self._next - len(self.returned)

    def draw(self, count: int) -> _Positions:
        """Return the positions of the next samples."""
        drawn = self.peek(count)
        self._next += count - len(self.returned[:count])
        self.returned = self.returned[count:]
        return drawn

    def peek(self, count: int) -> _Positions:
        """Return the result that :meth:`draw` would return."""
        again = self.returned[:count]
        return np.concatenate([again, np.arange(self._next, self._next + count - len(again))])

    def give_back(self, positions: _Positions) -> None:
        """Deal samples again, because they were lost."""
        self.returned = np.sort(np.concatenate([self.returned, positions]))

    def indices(self, positions: _Positions) -> list[int]:
        """Return the indices in the dataset of the samples at some positions."""
        return [int(self._order(epoch)[place]) for epoch, place in zip(*divmod(positions, self.length), strict=True)]

    def state(self, under_way: _Positions) -> tuple[int, _Positions]:
        """Return the state to continue from, as if all unused samples had been given back."""
        return self._next, np.sort(np.concatenate([self.returned, under_way]))

    def load(self, next_position: int, returned: _Positions) -> None:
        """Continue from a state that :meth:`state` returned."""
        self._next, self.returned = next_position, returned

    def _make_order(self, epoch: int) -> np.ndarray[Any, Any]:
        if self.seed is None:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, int(epoch)]).permutation(self.length)
