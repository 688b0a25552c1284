"""What happens to data that only one rank had, when that rank is lost."""

from __future__ import annotations

import logging

from mn_comm import Change, CommunicatorBase, is_elastic
from mn_data.plan import part

__all__ = ["place_of", "places", "tell_of_lost_parts"]

logger = logging.getLogger(__name__)


def places(communicator: CommunicatorBase) -> int:
    """Return the number of parts into which a dataset is divided: one for each rank that trains, none for spares."""
    return int(getattr(communicator, "places", communicator.size)) if is_elastic(communicator) else communicator.size


def place_of(communicator: CommunicatorBase, rank: int) -> int:
    """Return which part a rank gets. A spare, which may take any place later, gets the same part as another rank."""
    return rank % places(communicator)


def tell_of_lost_parts(communicator: CommunicatorBase, length: int, force_equal_length: bool) -> None:
    """Let rank 0 warn which samples are gone, whenever a rank is lost.

    Args:
        communicator: The ranks; nothing is done unless they are elastic.
        length: How many samples were divided among them.
        force_equal_length: Whether parts have equal lengths, as in :func:`mn_data.scatter_dataset`.
    """
    if not is_elastic(communicator):
        return
    size = places(communicator)
    # Whose part each rank of the current generation has; None for a spare, or a former one: others have its part, too.
    owners: list[int | None] = [rank if rank < size else None for rank in range(communicator.size)]

    def tell(change: Change) -> None:
        for lost in change.lost:
            owner = owners[lost]
            begin, end = (0, 0) if owner is None else part(length, size, owner, force_equal_length)
            if change.rank == 0 and begin < end:
                logger.warning(
                    "samples %d to %d of %d, in the order of scatter_dataset, were lost with rank %d: "
                    "training continues without them (mn_data.ElasticIterator loses none)",
                    *(begin, min(end, length) - 1, length, lost),
                )
        owners[:] = [owners[old] for old in change.survivors]
        owners.extend([None] * (change.size - len(owners)))

    communicator.on_change(tell)  # type: ignore[attr-defined]
