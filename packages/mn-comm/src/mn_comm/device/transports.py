"""Messages of compressed arrays on devices: through pinned host memory and MPI, or by NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.collectives.pieces import Messages
from mn_comm.collectives.transport import Transport
from mn_comm.device import nccl, staging

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks


class StagedTransport(Transport):
    """Sends arrays as in host memory, with one copy in each direction. It waits for the device."""

    def swap(self, outgoing: Messages, incoming: Messages, what: str) -> None:
        """Send arrays on the device to other ranks, and receive some from them; collective."""
        import cupy

        copies: dict[int, Any] = {}  # an array for several ranks is copied only once
        for array in (array for arrays in outgoing.values() for array in arrays):
            if id(array) not in copies:
                copies[id(array)] = staging.to_host(array)
        received = {rank: [staging.empty_pinned(a.shape, a.dtype) for a in arrays] for rank, arrays in incoming.items()}
        sent = {rank: [copies[id(array)] for array in arrays] for rank, arrays in outgoing.items()}
        super().swap(sent, received, what)
        for other, arrays in incoming.items():
            for array, copy in zip(arrays, received[other], strict=True):
                if array.size:
                    array.set(copy)
        cupy.cuda.get_current_stream().synchronize()  # from now on, the pinned memory may be reused


class NcclTransport(Transport):
    """Sends arrays from device to device, on the current stream, without waiting for it."""

    def __init__(self, ranks: Ranks, communicator: nccl.NcclCommunicator) -> None:
        super().__init__(ranks)
        self._communicator = communicator

    def swap(self, outgoing: Messages, incoming: Messages, what: str) -> None:
        """Send arrays on the device to other ranks, and receive some from them; collective."""
        with nccl.group():
            for messages, move in ((outgoing, self._communicator.send), (incoming, self._communicator.recv)):
                for other, array in ((other, array) for other, arrays in messages.items() for array in arrays):
                    if array.size:  # empty arrays are not passed to NCCL
                        move(array.view(np.uint8), other)
        self.count(outgoing)
