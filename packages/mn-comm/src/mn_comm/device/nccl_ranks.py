"""Whether NCCL can be used among the ranks of an MPI communicator, and its communicators, which are freed with it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from mn_comm.basis.mpi import MPI
from mn_comm.device import nccl
from mn_comm.ranks import agreement, watch

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


class _Launched(NamedTuple):
    """An operation that was launched on a device."""

    event: Any  # recorded after it
    communicator: nccl.NcclCommunicator
    what: str
    since: int  # in nanoseconds of the monotonic clock


class NcclRanks:
    """The use of NCCL among some ranks, on their current devices; creating one is collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # By device number; each with its own number, which is the same on all ranks.
        self._communicators: dict[int, tuple[int, nccl.NcclCommunicator]] = {}
        self._made: list[nccl.NcclCommunicator] = []
        self._count = 0
        self._launched: deque[_Launched] = deque()
        self._polling = threading.RLock()  # the program's thread and the stall monitor may poll at the same time
        self._failure: str | None = None
        self._activity = watch.Activity()  # the device's
        self.obstacle = _find_obstacle(ranks)  # why NCCL cannot be used, the same on every rank; `None` if it can
        watch.activities[id(self)] = self._activity
        watch.polled.append(weakref.WeakMethod(self.poll))

    def look_again(self) -> NcclRanks:
        """Check again, for the current devices, whether NCCL can be used; collective."""
        self.obstacle = _find_obstacle(self._ranks)
        return self

    def require(self) -> None:
        """Raise an exception on every rank if NCCL cannot be used."""
        if self.obstacle is not None:
            raise self.obstacle

    def connect(self) -> nccl.NcclCommunicator:
        """Return a communicator for the current devices of all ranks, or raise the obstacle on all; collective."""
        import cupy

        self.require()
        device = int(cupy.cuda.Device().id)
        number, communicator = self._communicators.get(device, (0, None))
        if self._ranks.differ(number) or communicator is None:
            self._count += 1
            self.look_again().require()
            communicator = self._make()
            self._communicators[device] = self._count, communicator
            self._made.append(communicator)
        return communicator

    def launched(self, communicator: nccl.NcclCommunicator, what: str) -> Any:
        """Let the operation that was just put on the current stream be watched; return an event recorded after it."""
        import cupy

        event = cupy.cuda.get_current_stream().record()
        self._launched.append(_Launched(event, communicator, what, time.monotonic_ns()))
        return event

    def poll(self) -> None:
        """Check for failed operations, and abort their communicators; also called by the stall monitor."""
        with self._polling:
            while self._launched and self._launched[0].event.done:
                self._launched.popleft()
            if not self._launched:
                self._activity.wait = None
                return
            _, communicator, what, since = self._launched[0]
            self._activity.wait = (f"NCCL's {what}", self._ranks, since)
            problem = communicator.problem()
            if problem is not None:
                self._failure = f"{what}: NCCL has failed on rank {self._ranks.rank}, a peer may be lost: {problem}"
                self._launched.clear()
                self._made.clear()
                communicator.abort()

    def raise_failure(self) -> None:
        """Raise the error of an operation that has failed since it was launched."""
        self.poll()
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def destroy(self) -> None:
        """Destroy the communicators; collective."""
        watch.activities.pop(id(self), None)
        with self._polling:
            self._launched.clear()  # their communicators must not be asked any more
        while self._made:
            self._made.pop().destroy()

    def _make(self) -> nccl.NcclCommunicator:
        unique_id = b""
        with agreement.raise_on_all(self._ranks):
            if self._ranks.rank == 0:
                unique_id = nccl.get_unique_id()
        unique_id = self._ranks.bcast(unique_id)
        # Not in a block that all ranks leave together, because NCCL itself waits for all ranks.
        connected: nccl.NcclCommunicator = self._ranks.wait_for(
            nccl.NcclCommunicator, self._ranks.size, unique_id, self._ranks.rank
        )
        return connected


def nccl_ranks_of(ranks: Ranks) -> NcclRanks:
    """Return the object for the use of NCCL among ranks; collective when it is first called for them."""
    if ranks.on_devices is None:
        ranks.on_devices = NcclRanks(ranks)
    found: NcclRanks = ranks.on_devices
    return found


def _find_obstacle(ranks: Ranks) -> Exception | None:
    problem, device = _look()
    allowed = os.environ.get(_SHARED, "") not in ("", "0")
    reports = ranks.allgather((problem, MPI.Get_processor_name(), device, allowed))
    for rank, (report, *_) in enumerate(reports):
        if report is not None:
            return RuntimeError(f"NCCL cannot be used on rank {rank}: {report}")
    first_on: dict[tuple[str, str], int] = {}
    for rank, (_, host, used, may_share) in enumerate(reports):
        other = first_on.setdefault((host, used), rank)
        if other != rank and not may_share:
            return ValueError(
                f"expected a GPU for each rank, got ranks {other} and {rank} both on {used} of {host}: choose the "
                f"device by intra_rank before the first use, or set {_SHARED}=1 to let NCCL 2.30 or later share it"
            )
    return None


def _look() -> tuple[str | None, str]:
    """Return why NCCL is unavailable here, or ``None``; and the PCI address, by which NCCL knows the device."""
    try:
        nccl.require()
    except RuntimeError as error:
        return str(error), ""
    import cupy

    return None, str(cupy.cuda.Device().pci_bus_id)
