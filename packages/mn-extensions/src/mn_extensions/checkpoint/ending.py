"""How training ended: files are removed only after it has ended normally on all ranks."""

from __future__ import annotations

import numpy as np

from mn_comm import CommunicatorBase, building_blocks, transact
from mn_comm.building_blocks import MPI


class Ending:
    """Whether training ended normally on all ranks; creating it is collective.

    A rank on which it did not announces this without waiting: the other ranks may never get here, because they hang in
    a collective or are dead. So this uses a separate MPI communicator.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._ranks: building_blocks.Ranks | None = building_blocks.Ranks(mpi_comm).duplicate()

    def is_well_on_all_ranks(self, is_well: bool) -> bool:
        """Return whether all ranks ended normally; the second time ``False``. Collective only on ranks that did."""
        if self._ranks is None:
            return False
        ranks, self._ranks = self._ranks, None
        here, everywhere = np.array([is_well], dtype=np.int32), np.zeros(1, dtype=np.int32)
        request = ranks.Iallreduce(here, everywhere, op=MPI.MIN)
        if not is_well:
            return False  # the communicator keeps the request, and so its memory
        ranks.wait(request, "Iallreduce")
        ranks.Free()
        return bool(everywhere[0])


class ElasticEnding:
    """Whether training ended normally on all remaining ranks; a rank on which it did not will end.

    Args:
        comm: The ranks, of an elastic communicator.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm: CommunicatorBase | None = comm

    def is_well_on_all_ranks(self, is_well: bool) -> bool:
        """Return whether all ranks ended normally; the second time ``False``. Collective only on ranks that did."""
        comm, self._comm = self._comm, None
        if comm is None or not is_well:
            return False
        transact(comm, lambda: comm.allgather_obj(None))
        return True
