"""The contestants: the communicators that can run here, on gradients of a given size, and ``MPI_Allreduce``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from mn_comm import Communicator, create_communicator, raise_on_all
from mn_tools.bench.measure import Turn
from mn_tools.bench.options import ITEM_BYTES

MPI_ALLREDUCE = "MPI_Allreduce"

# Every strategy that does not support a kind of array or a topology raises one of these, on every rank.
_REFUSALS = (TypeError, ValueError, RuntimeError)


class Parameter:
    """A value and its gradient."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.grad: Any = None


class Model:
    """Parameters with names.

    Args:
        arrays: Their values.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._named = [(f"/{i:06}", Parameter(array)) for i, array in enumerate(arrays)]
        self._params = [param for _, param in self._named]

    def namedparams(self) -> Iterable[tuple[str, Any]]:
        """Return names and parameters."""
        return iter(self._named)


class Gradients(Model):
    """A model of parameters with float32 gradients.

    Args:
        nbytes: The total size in bytes.
        count: The number of parameters among which the bytes are divided.
        device: Whether they are CuPy arrays, on the current device.
    """

    def __init__(self, nbytes: int, count: int, device: bool) -> None:
        length = nbytes // ITEM_BYTES
        bounds = [length * i // count for i in range(count + 1)]
        self._device = device
        self._xp: Any = importlib.import_module("cupy") if device else np
        super().__init__(self._xp.empty(end - begin, np.float32) for begin, end in pairwise(bounds))

    def fill(self, value: float) -> None:
        """Set all elements of the arrays."""
        for param in self._params:
            if self._device:
                param.data.set(np.full(param.data.shape, value, np.float32))
            else:
                param.data.fill(value)

    def average(self, comm: Communicator) -> None:
        """Average them, as after a backward pass: gradients in new arrays, which are no bucket's memory."""
        for param in self._params:
            param.grad = param.data
        comm.multi_node_mean_grad(self)
        if self._device:
            self._xp.cuda.get_current_stream().synchronize()

    def are(self, value: float) -> bool:
        """Return whether all elements of the gradients have a value, up to rounding."""
        grads = [param.grad.get() if self._device else param.grad for param in self._params]
        return all(np.allclose(grad, value, rtol=1e-5, atol=0) for grad in grads)


class Entrants:
    """The communicators that can run here.

    Args:
        mpi_comm: The ranks. Entering is collective.
        names: The names of communicators to try.

    Attributes:
        communicators: The communicators that can run here, by name.
        refusals: Why the other communicators cannot run here, by name.
        wrong: Contestants with wrong results: the name, and the bytes.
        notes: Their warnings, on any rank.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, names: Sequence[str]) -> None:
        self._mpi_comm = mpi_comm
        self.communicators: dict[str, Communicator] = {}
        self.refusals: dict[str, str] = {}
        self.wrong: list[tuple[str, int]] = []
        self.notes: list[str] = []
        for name in names:
            with self._attempting(name):
                self.communicators[name] = create_communicator(name, mpi_comm)

    def turns(self, gradients: Gradients, nbytes: int) -> dict[str, Turn]:
        """Try each communicator once, and return the averages of those that work; collective."""
        turns = {MPI_ALLREDUCE: Turn(_raw(self._mpi_comm, nbytes))}
        for name, comm in list(self.communicators.items()):
            with self._attempting(name):
                self._try(name, comm, gradients, nbytes)
                turns[name] = Turn(partial(gradients.average, comm))
            if name in self.refusals:
                self.communicators.pop(name).finalize()
        return turns

    def close(self) -> None:
        """Finalize the communicators; collective."""
        for comm in self.communicators.values():
            comm.finalize()

    def _try(self, name: str, comm: Communicator, gradients: Gradients, nbytes: int) -> None:
        rank, size = self._mpi_comm.rank, self._mpi_comm.size
        gradients.fill(rank + 1)
        gradients.average(comm)
        expected = rank + 1 if name == "dummy" else (size + 1) / 2
        if not self._mpi_comm.allreduce(gradients.are(expected), MPI.LAND):
            self.wrong.append((name, nbytes))

    @contextmanager
    def _attempting(self, name: str) -> Iterator[None]:
        """Note what a communicator warns of, and why it cannot run here."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except _REFUSALS as error:
                self.refusals[name] = self._mpi_comm.bcast(str(error).removeprefix(f"{name}: "))
        mine = [str(warning.message) for warning in caught]
        for note in [note for each in self._mpi_comm.allgather(mine) for note in each]:
            if note not in self.notes:
                self.notes.append(note)


def use_device(mpi_comm: MPI.Intracomm, intra_rank: int) -> None:
    """Make the GPU of this rank the current one; collective.

    Raises:
        RuntimeError: CuPy is missing or there is no GPU, on some rank (on every rank).
    """
    with raise_on_all(mpi_comm):
        try:
            import cupy
        except ImportError as error:
            raise RuntimeError(f"--device needs CuPy: {error}: pip install 'mn-comm[cuda12]', or cuda13") from None
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise RuntimeError(f"--device needs a GPU on every rank: {error}") from None
        cupy.cuda.Device(intra_rank % count).use()


def _raw(mpi_comm: MPI.Intracomm, nbytes: int) -> Callable[[], object]:
    # Not zeros(): all of its memory is one page, which stays in the cache.
    summand = np.ones(nbytes // ITEM_BYTES, np.float32)
    total = np.empty_like(summand)
    return lambda: mpi_comm.Allreduce(summand, total, MPI.SUM)
