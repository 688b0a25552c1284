"""``naive``: one MPI allreduce for each gradient; the reference that every other strategy is tested against."""

from __future__ import annotations

from mn_comm.strategies.flat import Flat

__all__ = ["Naive"]


class Naive(Flat):
    """One MPI allreduce for each gradient."""

    one_bucket_each = True
