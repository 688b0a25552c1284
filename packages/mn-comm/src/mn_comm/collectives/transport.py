"""Messages between ranks that exchange parts of buckets in fewer bytes, and a count of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mn_comm.collectives import pieces
from mn_comm.collectives.pieces import Messages

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

TAG = 7  # of all these messages


class Transport:
    """Ranks that exchange arrays in host memory (for devices: :mod:`mn_comm.device.transports`), and the bytes sent."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sent = 0  # how many bytes this rank has sent to others

    def swap(self, outgoing: Messages, incoming: Messages, what: str) -> None:
        """Send arrays to other ranks, and receive some from them; collective.

        Args:
            outgoing: For each rank that receives arrays, these arrays: one-dimensional and contiguous.
            incoming: For each rank that sends arrays, arrays of the same lengths and dtypes, to be overwritten.
            what: The name of the operation that it is a part of, as MPI calls it, such as ``Reduce_scatter``: it tells
                the stall monitor that this waits for all ranks.
        """
        for request in pieces.start(self.ranks, outgoing, incoming, TAG):
            self.ranks.wait_with_pauses(request, what)
        self.count(outgoing)

    def count(self, outgoing: Messages) -> None:
        """Record the number of bytes sent."""
        self.sent += sum(array.nbytes for arrays in outgoing.values() for array in arrays)
