"""Which samples each rank gets, and which are gone when a rank is lost."""

from __future__ import annotations

import logging

from mn_comm import Change, CommunicatorBase, is_elastic

logger = logging.getLogger(__name__)


def part(n_total_samples: int, size: int, rank: int, force_equal_length: bool) -> tuple[int, int]:
    """Return the indices at which the part of ``rank`` begins and ends.

    Args:
        n_total_samples: How many samples there are.
        size: How many ranks share them.
        rank: The rank whose part is requested.
        force_equal_length: Whether all parts have the same length, ``ceil(n_total_samples / size)``, so that
            neighbouring parts may share samples. Otherwise they are disjoint, and the first ``n_total_samples % size``
            parts have one sample more.

    Returns:
        The first index, and the one after the last.
    """
    if force_equal_length:
        begin = n_total_samples * rank // size
        return begin, begin + -(-n_total_samples // size)
    length, longer = divmod(n_total_samples, size)
    begin = rank * length + min(rank, longer)
    return begin, begin + length + (rank < longer)


def part_of(communicator: CommunicatorBase, rank: int, length: int, force_equal_length: bool) -> tuple[int, int]:
    """Return the indices at which the part of a communicator's rank begins and ends.

    There is a part for each rank that trains, and none for spares. A spare, which may take any place later, gets the
    same part as another rank.
    """
    size = _places(communicator)
    return part(length, size, rank % size, force_equal_length)


def tell_of_lost_parts(communicator: CommunicatorBase, length: int, force_equal_length: bool) -> None:
    """Let rank 0 warn which samples are gone, whenever a rank is lost.

    Args:
        communicator: The ranks; nothing is done unless they are elastic.
        length: How many samples were divided among them.
        force_equal_length: Whether parts have equal lengths, as in :func:`mn_data.scatter_dataset`.
    """
    if not is_elastic(communicator):
        return
    size = _places(communicator)
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


def _places(communicator: CommunicatorBase) -> int:
    """Return the number of parts into which a dataset is divided."""
    return int(getattr(communicator, "places", communicator.size)) if is_elastic(communicator) else communicator.size
