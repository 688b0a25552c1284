"""Dividing a dataset among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
import numpy as np

from mn_comm import Communicator, CommunicatorBase, create_communicator, expect_same, is_elastic, raise_on_all, transact
from mn_comm.building_blocks import MPI
from mn_data.columns import ArrayLayout, assemble, can_take, columns_of, leaves
from mn_data.plan import part_of, tell_of_lost_parts
from mn_data.transfer import Transfer, progress

_INT_MAX = 2**31 - 1


class DataSizeError(RuntimeError):
    """Raised by old versions for datasets above 2 GiB; kept so that scripts which catch it still work."""


def scatter_dataset(
    dataset: Any,
    comm: CommunicatorBase | MPI.Intracomm,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> chainer.datasets.SubDataset:
    """Divide a dataset that one rank has among all ranks; collective.

    Samples held in memory (an array, a list, a ``TupleDataset``, or a ``SubDataset`` of these) are divided: each rank
    receives only its own samples, and arrays are received as raw bytes directly into their final memory. Any other
    dataset, including one of a class derived from these, is sent to all ranks as an object, and each rank uses its part
    of it. This suits datasets that read or compute samples on demand.

    If standard error of rank 0 is a terminal and this takes more than two seconds, a progress bar is shown.

    Args:
        dataset: At the root the dataset, with a length; ignored elsewhere.
        comm: A communicator, or an mpi4py one.
        root: The rank that has the dataset.
        shuffle: Whether samples are put into a random order first.
        seed: The seed for that order; with the same seed, each rank gets the same samples again. ``None`` for a
            different order every time.
        max_buf_len: The maximum number of bytes passed to MPI at once.
        force_equal_length: Whether all parts have the same length, so that neighbouring parts may share a sample.
            Otherwise the parts are disjoint, and their lengths differ by at most one.

    Returns:
        This rank's part. If the samples were divided, it holds only those of this rank, in their order: its
        ``_dataset`` is not the whole dataset, and its ``_order`` is ``None``.

    Raises:
        TypeError: The dataset at the root has no length (on every rank).
        ValueError: ``root`` is out of range, or ``max_buf_len`` not in 1..2**31-1; or the ranks differ in one of these
            or in ``force_equal_length`` (on every rank).
        RuntimeError: The communicator is elastic, and the root was lost (on every rank that is left).
    """
    with communicator_over(comm) as communicator:
        named = _Root(communicator, root)
        transact(communicator, partial(_check, communicator, named, force_equal_length, max_buf_len))

        def scatter() -> tuple[chainer.datasets.SubDataset, int]:
            root = named.rank()
            order = _order(dataset, communicator, root, shuffle, seed)
            in_parts = isinstance(communicator, Communicator)  # others may have only the documented methods
            if in_parts and communicator.bcast_obj(communicator.rank == root and can_take(dataset), root=root):
                return _scatter_samples(dataset, order, communicator, root, max_buf_len, force_equal_length)
            to_send = (dataset, order) if communicator.rank == root else None
            whole, order = communicator.bcast_obj(to_send, max_buf_len=max_buf_len, root=root)
            bounds = part_of(communicator, communicator.rank, len(whole), force_equal_length)
            return chainer.datasets.SubDataset(whole, *bounds, order), len(whole)

        mine, length = transact(communicator, scatter)
        tell_of_lost_parts(communicator, length, force_equal_length)
        return mine


def scatter_index(
    n_total_samples: int, comm: CommunicatorBase | MPI.Intracomm, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Give each rank the first and last index of its part of a dataset; collective.

    Args:
        n_total_samples: At the root how many samples there are; ignored elsewhere.
        comm: A communicator, or an mpi4py one.
        root: The rank that knows the number.
        force_equal_length: Whether all parts have the same length; then some samples may be in two parts.

    Returns:
        The index of this rank's first sample, and the one after its last.

    Raises:
        TypeError: The number at the root is not an integer (on every rank).
        ValueError: It is negative, or the ranks differ in ``root`` or ``force_equal_length`` (on every rank); or
            ``root`` is out of range.
        RuntimeError: The communicator is elastic, and the root was lost (on every rank that is left).
    """
    with communicator_over(comm) as communicator:
        named = _Root(communicator, root)
        total = transact(communicator, partial(_total, n_total_samples, communicator, named, force_equal_length))
        return part_of(communicator, communicator.rank, total, force_equal_length)


class _Root:
    """The rank that has the dataset; it has another number if ranks below it are lost meanwhile.

    Args:
        communicator: The ranks.
        root: Its number now.
    """

    def __init__(self, communicator: CommunicatorBase, root: int) -> None:
        self.given = root
        self.size = communicator.size
        self._communicator = communicator
        self._is_here = communicator.rank == root

    def rank(self) -> int:
        """Return its number; collective.

        Raises:
            RuntimeError: It is lost (on every rank).
        """
        if not is_elastic(self._communicator):
            return self.given
        is_there = self._communicator.allgather_obj(self._is_here)
        if True not in is_there:
            raise RuntimeError(f"the dataset is lost with its root, rank {self.given} of {self.size}")
        return is_there.index(True)


def _total(n_total_samples: int, communicator: CommunicatorBase, named: _Root, force_equal_length: bool) -> int:
    """Return the number of samples that the root knows; collective."""
    _check(communicator, named, force_equal_length)
    root = named.rank()
    with raise_on_all(communicator):
        if communicator.rank == root:
            _check_count(n_total_samples)
    return int(communicator.bcast_obj(n_total_samples if communicator.rank == root else None, root=root))


def _order(
    dataset: Any, communicator: CommunicatorBase, root: int, shuffle: bool, seed: int | None
) -> np.ndarray[Any, Any] | None:
    """Check that the root's dataset has a length, and return there the order of its samples; collective."""
    with raise_on_all(communicator):
        if communicator.rank == root:
            length = _length(dataset)
            if shuffle:
                return np.random.RandomState(seed).permutation(length)
    return None


def _scatter_samples(
    dataset: Any, order: Any, communicator: CommunicatorBase, root: int, max_buf_len: int, force_equal_length: bool
) -> tuple[chainer.datasets.SubDataset, int]:
    """Send each rank its samples; return this rank's part, and the length of the whole dataset; collective."""
    from mn_comm.building_blocks import Ranks  # not at import, because it starts MPI

    is_root = communicator.rank == root
    layout, columns = columns_of(dataset, order) if is_root else (None, [])
    layout, length = communicator.bcast_obj((layout, len(dataset)) if is_root else None, root=root)
    bounds = [part_of(communicator, rank, length, force_equal_length) for rank in range(communicator.size)]
    begin, end = bounds[communicator.rank]
    mine: list[Any] = []
    with progress(communicator.rank == 0) as advance:
        transfer = Transfer(Ranks(communicator.mpi_comm), root, max_buf_len, advance)
        for index, leaf in enumerate(leaves(layout)):
            parts = [columns[index].select(range(*each)) for each in bounds] if is_root else []
            if isinstance(leaf, ArrayLayout):
                mine.append(transfer.send_array(parts, leaf) if is_root else transfer.recv_array(end - begin, leaf))
            else:
                mine.append(transfer.send_objects(parts) if is_root else transfer.recv_objects())
    return chainer.datasets.SubDataset(assemble(layout, mine), 0, end - begin), length


@contextmanager
def communicator_over(comm: CommunicatorBase | MPI.Intracomm) -> Iterator[CommunicatorBase]:
    """Yield a communicator over the ranks of ``comm``, which scripts may pass as an mpi4py one."""
    if not isinstance(comm, MPI.Intracomm):
        yield comm
        return
    wrapped = create_communicator("naive", comm)
    try:
        yield wrapped
    finally:
        wrapped.finalize()


def _check(communicator: CommunicatorBase, named: _Root, force_equal_length: bool, max_buf_len: int = 1) -> None:
    with raise_on_all(communicator):
        if not 0 <= named.given < named.size:
            raise ValueError(f"expected root in 0..{named.size - 1}, got {named.given}")
        if not 1 <= max_buf_len <= _INT_MAX:
            raise ValueError(f"expected max_buf_len in 1..{_INT_MAX}, got {max_buf_len}")
    arguments = (int(named.given), bool(force_equal_length), int(max_buf_len))
    expect_same(communicator, "root, force_equal_length and max_buf_len", arguments)


def _check_count(n_total_samples: Any) -> None:
    if isinstance(n_total_samples, bool) or not isinstance(n_total_samples, (int, np.integer)):
        raise TypeError(f"expected an integer for n_total_samples, got {type(n_total_samples).__name__}")
    if n_total_samples < 0:
        raise ValueError(f"expected n_total_samples of at least 0, got {n_total_samples}")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(f"expected a dataset with a length, got {type(dataset).__name__}: {dataset!r:.80}") from None
