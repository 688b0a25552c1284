"""Which samples each rank gets."""

from __future__ import annotations

__all__ = ["part"]


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
