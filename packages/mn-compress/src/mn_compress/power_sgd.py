"""Matrices as products of two thin matrices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mn_comm.collectives.transport import Transport
from mn_compress.base import Compression, set_integer, set_number
from mn_compress.exact import ExactFirst, average_exactly, mean_exactly
from mn_compress.exchange import Memory, Piece, Portion

_Array = Any  # NumPy's, or CuPy's


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Two thin factors of each matrix, found by one step of power iteration; vectors are sent uncompressed.

    Vogels et al., arXiv:1905.13727, with the names of PyTorch's ``PowerSGDState``. A gradient of more than two
    dimensions counts as a matrix; its first dimension gives the rows. If each rank of a node exchanges a share of a
    bucket, the rows of a matrix in one share count as a separate matrix.

    Every rank multiplies the factors itself. Results are equal bit for bit if all ranks have the same NumPy, the same
    BLAS and the same kind of processor or, for gradients on devices, the same CuPy, cuBLAS, cuSOLVER and devices.

    Args:
        rank: The number of columns of the factors.
        start_iter: The number of steps that are averaged exactly before compression starts.
        min_compression_rate: How many times fewer elements than the matrix the factors must have.
        seed: The seed for the first factors.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of range.
    """

    on_devices: ClassVar[bool] = True
    rank: int = 4
    start_iter: int = 1000
    min_compression_rate: float = 2
    seed: int = 0

    def __post_init__(self) -> None:
        set_integer(self, "rank", 1)
        set_integer(self, "start_iter", 0)
        set_integer(self, "seed", 0)
        set_number(self, "min_compression_rate")
        if not self.min_compression_rate > 0:
            raise ValueError(f"expected min_compression_rate above 0, got {self.min_compression_rate}")

    def exchange(self, portion: Portion) -> ExactFirst:
        """Return an object that averages such a portion."""
        return ExactFirst(PowerSGDExchange(self, portion), self.start_iter)


class _Matrix(NamedTuple):
    """Consecutive elements that form a matrix, and the position of its factors among all factors."""

    place: slice
    rows: int
    columns: int
    left: slice
    right: slice


class PowerSGDExchange:
    """Averages a portion by factors of its matrices.

    Args:
        numbers: The settings.
        portion: The description of the portion.
    """

    def __init__(self, numbers: PowerSGD, portion: Portion) -> None:
        self._numbers = numbers
        self._matrices: list[_Matrix] = []
        vectors: list[slice] = []
        left = right = 0
        for piece in portion.pieces:
            for place, rows, columns in _cut(piece):
                if not self._pays(rows, columns):
                    vectors.append(place)
                    continue
                factors = slice(left, left + rows * numbers.rank), slice(right, right + columns * numbers.rank)
                self._matrices.append(_Matrix(place, rows, columns, *factors))
                left, right = (factor.stop for factor in factors)
        xp = self._xp = portion.xp
        # Each vector, and its position behind the left factors, with which it is sent.
        ends = list(itertools.accumulate((each.stop - each.start for each in vectors), initial=left))
        self._vectors = [(place, slice(*at)) for place, at in zip(vectors, pairwise(ends), strict=True)]
        self._left = xp.empty(ends[-1], np.float32)
        # The same on every rank, so it must not depend on this rank's number.
        first = np.random.default_rng(numbers.seed).standard_normal(right, np.float32)
        self.memory = Memory(
            omitted={"error": xp.zeros(portion.length, np.float32)}, scaled={"right": xp.asarray(first)}
        )
        self._end_of_left = left

    def average(self, transport: Transport, portion: _Array, step: int) -> None:
        """Overwrite a portion with its mean over the ranks; collective."""
        if not self._matrices:
            average_exactly(transport, portion, self.memory)
            return
        xp, now, new = self._xp, self.memory.now, self.memory.new
        error, right = new["error"], new["right"]
        xp.add(portion, now["error"], out=error, casting="unsafe")
        for each in self._matrices:
            self._lefts(each)[...] = xp.matmul(self._matrix(error, each), self._factor(now["right"], each.right))
        for place, sent in self._vectors:
            self._left[sent] = error[place]
        mean_exactly(transport, self._left)
        is_finite = bool(xp.isfinite(self._left[: self._end_of_left]).all())
        for each in self._matrices if is_finite else ():
            left = self._lefts(each)
            left[...] = xp.linalg.qr(left)[0]
            self._factor(right, each.right)[...] = xp.matmul(self._matrix(error, each).T, left)
        if is_finite:
            mean_exactly(transport, right)
            is_finite = bool(xp.isfinite(right).all())
        self._write_means(portion, is_finite)
        if not is_finite:  # then the step is lost, but the part omitted before is not
            error[...] = now["error"]
            right[...] = now["right"]

    def _pays(self, rows: int, columns: int) -> bool:
        factors = (rows + columns) * self._numbers.rank
        is_thick = min(rows, columns) > self._numbers.rank
        return is_thick and self._numbers.min_compression_rate * factors < rows * columns

    def _write_means(self, portion: _Array, is_finite: bool) -> None:
        """Write products of factors and vectors to the portion, and the difference from each matrix to the error."""
        error, right = self.memory.new["error"], self.memory.new["right"]
        for each in self._matrices:
            if not is_finite:
                portion[each.place] = np.nan
                continue
            out, part = self._matrix(portion, each), self._matrix(error, each)
            factors = self._lefts(each), self._factor(right, each.right).T
            if isinstance(out, np.ndarray) and out.dtype == np.float32:
                product = np.matmul(*factors, out=out)  # faster than new memory on the host
            else:
                product = self._xp.matmul(*factors)
                out[...] = product
            self._xp.subtract(part, product, out=part)
        for place, sent in self._vectors:
            portion[place] = self._left[sent]
            error[place] = 0

    def _matrix(self, flat: _Array, each: _Matrix) -> _Array:
        return flat[each.place].reshape(each.rows, each.columns)

    def _lefts(self, each: _Matrix) -> _Array:
        return self._factor(self._left, each.left)

    def _factor(self, flat: _Array, place: slice) -> _Array:
        return flat[place].reshape(-1, self._numbers.rank)


def _cut(piece: Piece) -> Iterator[tuple[slice, int, int]]:
    """Cut a piece of a gradient into whole rows and the elements before and after them.

    Yields:
        The position of each part, its number of rows, and its number of columns.
    """
    length = piece.end - piece.begin
    columns = int(np.prod(piece.shape[1:], dtype=np.int64)) if len(piece.shape) > 1 else length
    head = min(length, -piece.start % columns)
    rows = (length - head) // columns
    tail = length - head - rows * columns
    begin = piece.begin
    for row, column in ((1, head), (rows, columns), (1, tail)):
        if row * column:
            yield slice(begin, begin + row * column), row, column
            begin += row * column
