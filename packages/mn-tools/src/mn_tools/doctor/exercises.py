"""Exercises for the ranks that the doctor starts: small versions of the operations of every training job.

Each takes the communicator of all ranks, is collective, returns its observation, and raises if something is wrong.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm.building_blocks import Ranks
from mn_comm.device import awareness
from mn_comm.ranks.shared_memory import share

# MPI libraries send short messages immediately, and long ones only when they are requested; this tests both.
_LENGTHS = (1, 1000, 1_000_000)


class _IoVec(ctypes.Structure):
    """A range of memory, as the system call ``process_vm_readv`` takes it."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def direct_copies(world: MPI.Intracomm) -> str:
    """Read the memory of another rank of this host with ``process_vm_readv``, as MPI does for long messages.

    Returns:
        Why some rank was not allowed to; empty if all were.
    """
    name = MPI.Get_processor_name()
    data = np.full(1000, world.rank, np.int64)
    everyone = world.allgather((name, os.getpid(), int(data.ctypes.data)))
    here = [rank for rank, (host, _, _) in enumerate(everyone) if host == name]
    peer = here[(here.index(world.rank) + 1) % len(here)]
    _, pid, address = everyone[peer]
    refusals = world.allgather("" if peer == world.rank else _refusal(pid, address, peer, data.size))
    return next((f"rank {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal), "")


def _refusal(pid: int, address: int, expected: int, length: int) -> str:
    received = np.full(length, -1, np.int64)
    local = _IoVec(received.ctypes.data, received.nbytes)
    remote = _IoVec(address, received.nbytes)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    count = read(pid, ctypes.byref(local), one, ctypes.byref(remote), one, no_flags)
    if count < 0:
        error = ctypes.get_errno()
        return f"process_vm_readv failed (errno {error}, {os.strerror(error)})"
    wrong = int(np.count_nonzero(received != expected))
    return f"process_vm_readv read {wrong} wrong values: the ranks see different process numbers" if wrong else ""


def point_to_point(world: MPI.Intracomm) -> str:
    """Send arrays of several lengths around the ring of all ranks."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for length in _LENGTHS:
        received = np.empty(length, np.float32)
        world.Sendrecv(np.full(length, world.rank, np.float32), right, 1, received, left, 1)
        _expect(received, left, f"from rank {left}")
    return f"{_LENGTHS[0]} to {_LENGTHS[-1]:,} numbers to the next rank and from the one before"


def reduction(world: MPI.Intracomm) -> str:
    """Add arrays up over all ranks."""
    for length in _LENGTHS:
        total = np.empty(length, np.float32)
        world.Allreduce(np.full(length, world.rank + 1, np.float32), total, MPI.SUM)
        _expect(total, world.size * (world.size + 1) // 2, "as the sum")
    return f"{_LENGTHS[-1]:,} numbers added up over {world.size} ranks"


def shared_memory(world: MPI.Intracomm) -> str:
    """Read the data that the other ranks of this host have written to shared memory, as averaging does."""
    name = MPI.Get_processor_name()
    hosts = world.allgather(name)
    here = Ranks(world).split(hosts.index(name), world.rank)
    try:
        segments = share(here, 1 << 20)
        segments[here.rank][:] = here.rank
        here.Barrier()
        for rank, segment in enumerate(segments):
            _expect(segment, rank, f"in the memory of rank {rank} of {name}")
        here.Barrier()
        return f"1 MiB of each of {here.size} ranks on {name}"
    finally:
        here.Free()


def awareness_of_devices(world: MPI.Intracomm) -> tuple[bool, bool]:
    """Return whether MPI is regarded as CUDA-aware, and whether the library itself says so."""
    aware = awareness.is_cuda_aware(Ranks(world))
    setting = os.environ.pop(awareness.SETTING, None)
    try:
        return aware, awareness.is_cuda_aware(Ranks(world))
    finally:
        if setting is not None:
            os.environ[awareness.SETTING] = setting


def devices_in_use(world: MPI.Intracomm) -> list[tuple[str, str]]:
    """Return, by rank, the host and the device that ``intra_rank`` selects; empty if there is no device."""
    name = MPI.Get_processor_name()
    hosts = world.allgather(name)
    intra_rank = hosts[: world.rank].count(name)
    return world.allgather((name, _device(intra_rank)))


def _device(intra_rank: int) -> str:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        return str(cupy.cuda.Device(intra_rank % count).pci_bus_id) if count else ""
    except Exception:
        return ""


def _expect(array: Any, value: int, where: str) -> None:
    wrong = int(np.count_nonzero(array != value))
    if wrong:
        raise RuntimeError(f"expected {array.size} times {value} {where}, got {wrong} other values")
