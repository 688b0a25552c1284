"""Gradients on a device that are sent together: packed by one kernel launch, and unpacked by one."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mn_comm.basis.config import Config
from mn_comm.device import nccl, staging
from mn_comm.device.kernels import Table, pack, unpack
from mn_comm.gradients.bucket import Bucket
from mn_comm.gradients.interfaces import check_floats
from mn_comm.gradients.parts import Arrays, Exchanged, Part
from mn_comm.gradients.strategies import Strategy
from mn_comm.ranks.background import Future


class DeviceStrategy:
    """A way to average buckets on devices; those that there are, are in :mod:`mn_comm.device.strategies`."""

    shares = 1  # the number of equal shares of which a bucket's memory must consist
    uses_nccl = False  # whether it calls NCCL, so that all ranks must have agreed on their gradients before
    compresses = False  # whether gradients are compressed on the device

    def __init__(self, host: Strategy) -> None:
        self.host = host  # the strategy for arrays in host memory

    def is_staged(self, dtype: np.dtype[Any]) -> bool:
        """Return whether a bucket of this dtype needs memory of the host's strategy as well."""
        return False

    def connect(self) -> nccl.NcclCommunicator | None:
        """Return NCCL's communicator for the current devices of all ranks, if it is used; collective."""
        return None

    def average(self, bucket: DeviceBucket) -> Any:
        """Start to average a packed bucket; collective. Return a future of the mean, an array like ``bucket.flat``."""
        return bucket.submit_on_side_stream(lambda: self.mean(bucket))

    def mean(self, bucket: DeviceBucket) -> Any:
        """Overwrite a packed bucket with its mean, on the current stream, and return ``bucket.flat``; collective."""
        raise NotImplementedError


class DeviceBucket:
    """Gradients of one dtype, on one device, that are sent together; see :class:`.AnyBucket`.

    It consists of whole gradients, and all of it is exchanged. ``side`` is the stream that runs beside the current one;
    ``None`` for the current stream itself.
    """

    def __init__(
        self,
        index: int,
        exchanged: Exchanged,
        whole: Any,
        strategy: DeviceStrategy,
        config: Config,
        *,
        host: Bucket | None = None,
        side: Any = None,
    ) -> None:
        import cupy

        self._side = side
        # All that use its memory: the one beside, and the one on which the program has used it last.
        self._streams = [side, None]
        allocated_on = cupy.cuda.get_current_stream()
        weakref.finalize(self, _let_wait, allocated_on, self._streams, whole.device).atexit = False
        parts, specs = exchanged.parts, exchanged.specs
        self.index = index
        self.exchanged = exchanged
        self.whole = whole  # its memory on the device, in the dtype in which it is sent, in equal shares
        self.flat = whole[: parts[-1].end]  # the memory of the gradients
        self.host = host  # the host bucket through which it is copied, if any
        self.pinned: Any = None  # pinned memory, if one share of the bucket is copied through host memory
        self.nccl: Any = None  # NCCL's communicator, if it is used
        self.members = [part.member for part in parts]
        self.names = [specs[member][0] for member in self.members]
        self.shapes = [specs[member][1] for member in self.members]
        self.submit: Callable[[Callable[[], Any]], Future[Any]] = Future
        self._dtype = specs[parts[0].member][2]
        self.needs_agreement = strategy.uses_nccl
        self._strategy = strategy
        groups = [parts] if config.batched_copy else [[part] for part in parts]
        self._tables = [(group, _table(group)) for group in groups]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(self.flat.nbytes)

    def average_in_place(self, arrays: Arrays) -> None:
        """Overwrite gradients with their means over all ranks; collective."""
        self.pack(arrays)
        self.unpack(arrays, self.launch().wait())

    def launch(self) -> Any:
        """Start to average the packed gradients; collective. Return a future of ``flat``."""
        return self._strategy.average(self)

    def average(self, array: Any = None) -> Any:
        """See :meth:`.AnyBucket.average`."""
        import cupy

        if array is None:
            return self.launch()
        check_floats(array)
        with self.flat.device:
            # Allocated here, because the current stream reads it: CuPy gives memory that was allocated on a stream, as
            # soon as it is freed, to the next operation on that stream, without waiting for any other stream.
            mean = cupy.empty(array.shape, array.dtype)

        def average() -> Any:
            mean.set(self._strategy.host.mean_of(staging.to_host(array)))
            return mean

        return self.submit_on_side_stream(average)

    def pack(self, arrays: Arrays) -> None:
        """Copy gradients, of any memory layout, into the bucket; ``None`` counts as zeros."""
        with self.flat.device:
            self._follow_stream()
            for group, table in self._tables:
                sources = [self._contiguous(arrays[part.member]) for part in group]
                pack(table, sources, self._dtype, self.flat[group[0].begin :])

    def unpack(self, arrays: Arrays, means: Any) -> None:
        """Write the means in the bucket to the gradients."""
        with self.flat.device:
            self._follow_stream()
            for group, table in self._tables:
                grads = [arrays[part.member] for part in group]
                plain = [grad if grad.flags.c_contiguous else None for grad in grads]
                if any(grad is not None for grad in plain):
                    unpack(table, plain, self._dtype, means[group[0].begin :])
                for part, grad, other in zip(group, grads, plain, strict=True):
                    if other is None:
                        grad[...] = means[part.begin : part.end].reshape(grad.shape)

    def packed(self) -> Any:
        """Return an event after all operations that are on the current stream now; ``None`` if there is no other."""
        import cupy

        if self._side is None:
            return None
        with self.flat.device:  # each device has its own current stream
            return cupy.cuda.get_current_stream().record()

    @contextlib.contextmanager
    def on_side_stream(self, after: Any = None) -> Iterator[Any]:
        """Make the bucket's device and side stream the current ones; the stream first waits for the event ``after``."""
        import cupy

        with self.flat.device:
            stream = self._side or cupy.cuda.get_current_stream()
            if after is not None:
                stream.wait_event(after)
            with stream:
                yield stream

    def submit_on_side_stream(self, function: Callable[[], Any]) -> _OnDevice:
        """Submit a function for :meth:`finish`, after all operations that are on the current stream now."""
        packed = self.packed()
        return _OnDevice(self, self.submit(lambda: self.finish(function, after=packed)))

    def finish(self, function: Callable[..., Any], *args: Any, after: Any = None) -> Any:
        """Return the result of a function, computed on the side stream, when its operations have ended."""
        with self.on_side_stream(after) as stream:
            result = function(*args)
            stream.synchronize()  # next, ranks may reuse pinned memory, and another stream uses the result
        return result

    def _follow_stream(self) -> None:
        """Let the current stream wait for the one on which the program has packed or unpacked before."""
        import cupy

        current = cupy.cuda.get_current_stream()
        _let_wait(current, self._streams[1:], self.flat.device)
        self._streams[1] = current

    def _contiguous(self, grad: Any) -> Any:
        import cupy

        if grad is None:
            return None
        if grad.device.id != self.flat.device.id:
            raise ValueError(f"expected gradients on device {self.flat.device.id}, got one on device {grad.device.id}")
        return cupy.ascontiguousarray(grad)


class _OnDevice:
    """A future of an array that a worker, if there is one, computes or copies on a bucket's device and side stream."""

    def __init__(self, bucket: DeviceBucket, future: Future[Any]) -> None:
        self._bucket = bucket
        self._future = future

    def wait(self) -> Any:
        """Return the array."""
        return self._future.wait()

    def then(self, function: Callable[[Any], Any]) -> _OnDevice:
        """Return a future of a function of the array, computed in the worker, on its device."""
        return _OnDevice(self._bucket, self._future.then(functools.partial(self._bucket.finish, function)))


def _let_wait(stream: Any, others: Sequence[Any], device: Any) -> None:
    """Let a stream wait for others, if they are different ones.

    Also when a bucket is gone, maybe with a mean that nobody has waited for: CuPy gives memory that was freed to the
    next operation on the stream on which it was allocated. Not in ``__del__``: the streams could be gone earlier.
    """
    for other in others:
        if other is not None and other.ptr != stream.ptr:
            with device:
                stream.wait_event(other.record())


def _table(parts: Sequence[Part]) -> Table:
    first = parts[0].begin
    return Table([part.begin - first for part in parts], parts[-1].end - first)
