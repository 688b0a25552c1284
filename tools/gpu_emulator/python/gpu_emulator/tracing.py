"""What a program has asked the emulated devices to do, for tests that count copies, launches and waits."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

__all__ = ["Operation", "Trace"]

_LIBRARY = "libgpu_emulator.so"


class Operation(NamedTuple):
    """One call of CUDA or NCCL.

    Attributes:
        kind: ``kernel``, ``copy``, ``nccl``, ``wait_event``, or ``wait`` if the host waits for the device.
        name: Of the kernel or NCCL's operation; the direction of the copy; what the host waits for.
        nbytes: How much is copied or sent.
        thread: The name of the thread of Python that called it.
        stream: The handle of the stream; 0 for the null stream.
        device: The number of the device.
    """

    kind: str
    name: str
    nbytes: int
    thread: str
    stream: int
    device: int


class Trace:
    """Records the operations of this process within a block."""

    def __enter__(self) -> Trace:
        self._kept: list[Operation] | None = None
        ctypes.CDLL(_LIBRARY).gpu_emulator_record(1)
        return self

    def __exit__(self, *error: object) -> None:
        self._kept = self.operations
        ctypes.CDLL(_LIBRARY).gpu_emulator_record(0)

    @property
    def operations(self) -> list[Operation]:
        """The operations since the beginning of the block."""
        return _read() if self._kept is None else self._kept

    def names(self, *kinds: str) -> list[str]:
        """Return the names of the operations of some kinds."""
        return [each.name for each in self.operations if each.kind in kinds]


def _read() -> list[Operation]:
    recorded = ctypes.CDLL(_LIBRARY).gpu_emulator_recorded
    recorded.argtypes, recorded.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    buffer = ctypes.create_string_buffer(recorded(None, 0) + (1 << 16))  # other threads may go on
    recorded(buffer, len(buffer))
    threads = {each.native_id: each.name for each in threading.enumerate()}
    found = []
    for line in buffer.value.decode().splitlines():
        kind, name, nbytes, thread, stream, device = line.split("\t")
        found.append(Operation(kind, name, int(nbytes), threads.get(int(thread), "?"), int(stream), int(device)))
    return found
