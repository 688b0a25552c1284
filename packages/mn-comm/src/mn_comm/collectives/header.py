"""The few bytes sent before an array, which tell receivers how much memory to allocate, or what went wrong.

They fit into a frame of fixed length, so that one message of known size announces an array. For the rare header that
does not (a structured dtype, a long error message), the frame says so, and the header follows in a separate message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis import placement
from mn_comm.basis.mpi import MPI
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["Header", "allgather", "attempt", "bcast", "describe", "raise_failure", "recv", "send"]

_FRAME_BYTES = 192
_PREFIX_BYTES = 8  # the mark, by which a receiver recognizes a header, then the length of the payload
_MARK = b"mnc1"


class Header(NamedTuple):
    """Describes the data that follows.

    Attributes:
        dtypes: The dtype of each array that follows.
        shapes: The shape of each.
        is_tuple: Whether the user passed several arrays, rather than one.
        failure: What was wrong with the sender's input, by type and message; if it is set, no array follows.
        on_device: Whether each array is on a device at the sender; empty if none is.
    """

    dtypes: tuple[np.dtype[Any], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    is_tuple: bool = False
    failure: tuple[str, str] | None = None
    on_device: tuple[bool, ...] = ()

    def make_room(self) -> list[np.ndarray[Any, Any]]:
        """Return host memory for receiving the arrays."""
        places = self.on_device or (False,) * len(self.shapes)
        return [placement.make_room(*each) for each in zip(self.shapes, self.dtypes, places, strict=True)]

    def deliver(self, received: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        """Return the received arrays, on the current device if the sender had them on a device."""
        places = self.on_device or (False,) * len(self.shapes)
        return [placement.deliver(*each) for each in zip(received, places, strict=True)]


def describe(arrays: Sequence[Any], is_tuple: bool = False) -> Header:
    """Return the header that announces ``arrays``."""
    on_device = tuple(placement.is_device_array(a) for a in arrays)
    shapes = tuple(a.shape for a in arrays)
    return Header(tuple(a.dtype for a in arrays), shapes, is_tuple, on_device=on_device if any(on_device) else ())


def attempt(check: Callable[[], Header]) -> tuple[Header, Exception | None]:
    """Return the result of ``check``, or a header that carries its exception, and the exception itself."""
    try:
        return check(), None
    except Exception as error:
        return Header(failure=agreement.describe(error)), error


def raise_failure(header: Header, rank: int, own: Exception | None = None) -> None:
    """Raise the failure in a header that ``rank`` sent; ``own`` is this rank's exception, raised unchanged."""
    if own is not None:
        raise own
    if header.failure is not None:
        raise agreement.remote_error(rank, *header.failure)


def bcast(ranks: Ranks, header: Header | None, root: int) -> Header:
    """Send the root's header to every rank; collective."""
    payload = b"" if header is None else pickle.dumps(tuple(header))
    frame = _frame(payload)
    ranks.Bcast(frame, root)
    if _fits(frame):
        return _open(frame)
    return _loads(ranks.bcast(payload, root))


def allgather(ranks: Ranks, header: Header) -> list[Header]:
    """Send every rank's header to every rank, ordered by rank; collective."""
    payload = pickle.dumps(tuple(header))
    frames = np.empty((ranks.size, _FRAME_BYTES), dtype=np.uint8)
    ranks.Allgather(_frame(payload), frames)
    if all(_fits(frame) for frame in frames):
        return [_open(frame) for frame in frames]
    return [_loads(other) for other in ranks.allgather(payload)]


def send(ranks: Ranks, header: Header, dest: int, tag: int) -> None:
    """Send a header to one rank."""
    payload = pickle.dumps(tuple(header))
    frame = _frame(payload)
    ranks.Send(frame, dest, tag)
    if not _fits(frame):
        ranks.Send(np.frombuffer(payload, dtype=np.uint8), dest, tag)


def recv(ranks: Ranks, source: int, tag: int) -> tuple[Header, int, int]:
    """Receive a header; ``source`` and ``tag`` may be MPI's wildcards.

    Returns:
        The header, and the rank and tag it came with: the arrays that follow must be received with these.

    Raises:
        RuntimeError: The message is not a header: the peer used another kind of send.
    """
    status = MPI.Status()
    message = ranks.Mprobe(source, tag, status)
    nbytes = status.Get_count(MPI.BYTE)
    frame = np.zeros(max(nbytes, _PREFIX_BYTES), dtype=np.uint8)
    message.Recv([frame, nbytes, MPI.BYTE])
    source, tag = status.source, status.tag
    if nbytes != _FRAME_BYTES or frame[: len(_MARK)].tobytes() != _MARK:
        raise RuntimeError(
            f"recv: expected an array sent by send(), got another message of {nbytes} bytes from rank {source} with "
            f"tag {tag}: objects sent by send_obj() must be received by recv_obj()"
        )
    if _fits(frame):
        return _open(frame), source, tag
    payload = np.empty(_length(frame), dtype=np.uint8)
    ranks.Recv(payload, source, tag)
    return _loads(payload.tobytes()), source, tag


def _frame(payload: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    prefix = _MARK + len(payload).to_bytes(_PREFIX_BYTES - len(_MARK), "little")
    return np.array(bytearray((prefix + payload)[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")), dtype=np.uint8)


def _length(frame: np.ndarray[Any, Any]) -> int:
    return int.from_bytes(frame[len(_MARK) : _PREFIX_BYTES].tobytes(), "little")


def _fits(frame: np.ndarray[Any, Any]) -> bool:
    return _length(frame) <= _FRAME_BYTES - _PREFIX_BYTES


def _open(frame: np.ndarray[Any, Any]) -> Header:
    return _loads(frame[_PREFIX_BYTES : _PREFIX_BYTES + _length(frame)].tobytes())


def _loads(payload: bytes) -> Header:
    return Header(*pickle.loads(payload))
