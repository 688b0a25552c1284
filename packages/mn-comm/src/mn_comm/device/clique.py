"""When NCCL can be used among the ranks of an MPI communicator, and its communicators, made when first needed.

Both are kept as an attribute of the MPI communicator, so that whoever has that has them, and they go when it is freed.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from mpi4py import MPI

from mn_comm import agreement, nccl

__all__ = ["Clique", "clique_of"]

_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


class Clique:
    """What NCCL can do among the ranks of an MPI communicator; creating one is collective.

    Args:
        mpi_comm: The ranks; their current devices are what NCCL is going to use.

    Attributes:
        obstacle: Why NCCL cannot be used, the same on every rank; ``None`` if it can.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self._mpi_comm = mpi_comm
        self._communicators: dict[int, nccl.NcclCommunicator] = {}
        self.obstacle = _find_obstacle(mpi_comm)

    def require(self) -> None:
        """Raise, on every rank, what keeps NCCL from being used, if anything does."""
        if self.obstacle is not None:
            raise self.obstacle

    def communicator(self) -> nccl.NcclCommunicator:
        """Return the communicator for the current device.

        Collective when a device is first used: ranks must change their devices together.

        Raises:
            RuntimeError: NCCL or CuPy is missing on some rank (on every rank).
            ValueError: Two ranks share a device, which NCCL has not been told to allow (on every rank).
        """
        import cupy

        self.require()
        device = int(cupy.cuda.Device().id)
        if device not in self._communicators:
            self._communicators[device] = self._connect()
        return self._communicators[device]

    def destroy(self) -> None:
        """Destroy the communicators; collective."""
        while self._communicators:
            self._communicators.popitem()[1].destroy()

    def _connect(self) -> nccl.NcclCommunicator:
        unique_id = b""
        with agreement.together(self._mpi_comm):
            if self._mpi_comm.rank == 0:
                unique_id = nccl.get_unique_id()
        unique_id = self._mpi_comm.bcast(unique_id)
        # Not in a block that all ranks leave together: NCCL itself waits for all of them.
        return nccl.NcclCommunicator(self._mpi_comm.size, unique_id, self._mpi_comm.rank)


def clique_of(mpi_comm: MPI.Intracomm) -> Clique:
    """Return the clique of an MPI communicator; collective when it is first asked for."""
    known: Any = mpi_comm.Get_attr(_keyval())
    clique: Clique = known or Clique(mpi_comm)
    if known is None:
        mpi_comm.Set_attr(_keyval(), clique)
    return clique


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, clique: clique.destroy())


def _find_obstacle(mpi_comm: MPI.Intracomm) -> Exception | None:
    problem, device = _look()
    allowed = os.environ.get(_SHARED, "") not in ("", "0")
    reports = mpi_comm.allgather((problem, MPI.Get_processor_name(), device, allowed))
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
    """Return what is missing on this rank, and the PCI address of its device, by which NCCL tells devices apart."""
    try:
        nccl.require()
    except RuntimeError as error:
        return str(error), ""
    import cupy

    return None, _pci_bus_id(cupy.cuda.Device())


def _pci_bus_id(device: Any) -> str:
    return str(device.pci_bus_id)
