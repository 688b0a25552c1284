"""Scatter: one array to each rank, from one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mn_comm.basis import placement, wire
from mn_comm.collectives import header, pieces
from mn_comm.collectives.roots import same_root

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = ["scatter"]

_Array = np.ndarray[Any, Any]


def scatter(ranks: Ranks, xs: Any, root: int = 0) -> _Array:
    """Scatter arrays; see :meth:`mn_comm.CommunicatorBase.scatter`."""
    parts: list[_Array] = []
    root = same_root(ranks, root, lambda root: parts.extend(split_parts(xs, ranks.size) if ranks.rank == root else []))
    headers = [header.describe([part]) for part in parts] if parts else None
    announced: header.Header = ranks.scatter(headers, root)
    if ranks.rank == root:
        outgoing = {dest: [placement.to_host(part)] for dest, part in enumerate(parts) if dest != root}
        ranks.wait_all(pieces.start(ranks, outgoing, {}))
        own: _Array = parts[root].copy()
        return own
    (received,) = announced.make_room()
    ranks.wait_all(pieces.irecv(ranks, received, root))
    return announced.deliver([received])[0]  # type: ignore[no-any-return]


def split_parts(xs: Any, size: int) -> list[_Array]:
    """Return one array for each rank; those in host memory are C-contiguous.

    Raises:
        TypeError: They are not arrays, or their dtypes differ.
        ValueError: There are not ``size`` of them.
    """
    is_array = isinstance(xs, np.ndarray) or placement.is_device_array(xs)
    if is_array and xs.ndim == 0:
        raise ValueError(f"scatter: expected an array whose first axis has length {size}, got a scalar array")
    if not is_array and not isinstance(xs, (tuple, list)):
        raise TypeError(f"scatter: expected an array or a tuple of {size} arrays, got {type(xs).__name__}")
    if len(xs) != size:
        raise ValueError(f"scatter: expected {size} parts, one for each rank, got {len(xs)}")
    if is_array:
        xs = [xs[rank, ...] for rank in range(size)]  # with the ellipsis, parts are never scalars
    checked = wire.check_parts(xs, "scatter")
    return [part if placement.is_device_array(part) else np.asarray(part, order="C") for part in checked]
