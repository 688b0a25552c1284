"""What ranks exchange before an array: the same root, and a header that says what follows, or what went wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.basis.mpi import MPI
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

_MARK = b"mnc1"  # by which a receiver recognizes a header


def same_root(ranks: Ranks, root: Any, prepare: Callable[[int], object] = lambda root: None) -> int:
    """Return the root as an int; all ranks raise if it is no rank, they differ, or ``prepare`` raises; collective.

    Without this check, ranks with different roots would wait forever, or each take its own array for the root's. It is
    one reduction together with what else has to be checked, by ``prepare``: a rank that is interrupted while it waits
    for the others should not have to meet them again. ``prepare`` gets the root, and must not communicate.
    """

    def check() -> int:
        number = wire.check_rank(root, ranks.size, "root")
        prepare(number)
        return number

    return agreement.agree(ranks, check, lambda roots: agreement.difference_of("root", roots))


class Header(NamedTuple):
    """Describes the data that follows."""

    dtypes: tuple[np.dtype[Any], ...] = ()  # the dtype of each array that follows
    shapes: tuple[tuple[int, ...], ...] = ()  # the shape of each
    is_tuple: bool = False  # whether the user passed several arrays, rather than one
    failure: tuple[str, str] | None = None  # what was wrong with the input: type and message; then no array follows
    on_device: tuple[bool, ...] = ()  # whether each array is on a device at the sender

    def make_room(self) -> list[np.ndarray[Any, Any]]:
        """Return host memory for receiving the arrays."""
        return [placement.make_room(*each) for each in zip(self.shapes, self.dtypes, self.on_device, strict=True)]

    def deliver(self, received: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
        """Return the received arrays, on the current device if the sender had them on a device."""
        return [placement.deliver(*each) for each in zip(received, self.on_device, strict=True)]


def describe(arrays: Sequence[Any], is_tuple: bool = False) -> Header:
    """Return the header that announces ``arrays``."""
    dtypes, shapes = tuple(a.dtype for a in arrays), tuple(a.shape for a in arrays)
    return Header(dtypes, shapes, is_tuple, on_device=tuple(placement.is_device_array(a) for a in arrays))


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


def send(ranks: Ranks, header: Header, dest: int, tag: int) -> None:
    """Send a header to one rank."""
    ranks.Send(np.frombuffer(_MARK + pickle.dumps(tuple(header)), np.uint8), dest, tag)


def recv(ranks: Ranks, source: int, tag: int) -> tuple[Header, int, int]:
    """Receive a header; return also the rank and tag with which the arrays that follow must be received.

    ``source`` and ``tag`` may be MPI's wildcards. A message that another kind of send has sent is a RuntimeError.
    """
    status = MPI.Status()
    message = ranks.Mprobe(source, tag, status)
    content = np.empty(status.Get_count(MPI.BYTE), np.uint8)
    message.Recv([content, MPI.BYTE])
    received = content.tobytes()
    if not received.startswith(_MARK):
        raise RuntimeError(
            f"recv: expected an array sent by send(), got another message of {content.size} bytes from rank "
            f"{status.source} with tag {status.tag}: objects sent by send_obj() must be received by recv_obj()"
        )
    return Header(*pickle.loads(received[len(_MARK) :])), status.source, status.tag
