"""The memory of one bucket on a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from mn_comm.intra import Buffer

__all__ = ["DeviceBuffer", "DeviceStrategy"]


@dataclass(frozen=True, eq=False)
class DeviceBuffer:
    """One-dimensional memory on a device that gradients are packed into and averaged in.

    Attributes:
        array: A CuPy array, of as many elements as the gradients have.
        strategy: What averages it.
        divisor: What every gradient is divided by while it is packed; 1 if the strategy divides.
        host: Where the elements, or some of them, pass through host memory; ``None`` where they need not.
        whole: ``array`` and what a strategy has put behind it to make shards equal.
    """

    array: Any
    strategy: DeviceStrategy
    divisor: int
    host: Buffer | None = None
    whole: Any = field(default=None)

    @property
    def nbytes(self) -> int:
        """How many bytes are averaged."""
        return int(self.array.nbytes)

    def average(self) -> None:
        """Overwrite the memory with its mean over all ranks, on CuPy's current stream; collective."""
        with self.array.device:
            self.strategy.average(self)

    def average_in(self, thread: Executor, stream: Any) -> Callable[[], None]:
        """Have a thread average the memory on a stream of its own, after what the current stream does by now.

        Args:
            thread: The thread.
            stream: The CuPy stream; the same for all buffers whose averages follow one another.

        Returns:
            What lets the stream that is current then go on when the average is there.
        """
        import cupy

        packed = cupy.cuda.get_current_stream().record()

        def average() -> Any:
            with self.array.device, stream:
                stream.wait_event(packed)
                self.strategy.average(self)
                return stream.record()

        averaged = thread.submit(average)
        return lambda: cupy.cuda.get_current_stream().wait_event(averaged.result())


class DeviceStrategy(Protocol):
    """A way to average a buffer on a device over all ranks."""

    def allocate(self, length: int, dtype: Any) -> DeviceBuffer:
        """Return memory on the current device for ``length`` elements of a NumPy dtype; collective."""
        ...

    def average(self, buffer: DeviceBuffer) -> None:
        """Overwrite a buffer, packed and divided as it asks for, with the mean, on the current stream; collective."""
        ...
