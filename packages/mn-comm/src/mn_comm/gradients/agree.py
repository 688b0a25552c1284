"""Steps 1 and 2: select gradients, and check that all ranks have the same ones; otherwise, all ranks raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_comm.basis.protocols import Model, Parameter
from mn_comm.gradients.interfaces import JoinMessages
from mn_comm.gradients.signature import Signature, explain, signature_of
from mn_comm.ranks.agreement import digest

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

Named = tuple[str, Parameter]
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class Selection(NamedTuple):
    """The gradients that take part, sorted by name."""

    params: list[Named]  # names and parameters
    likes: list[Any]  # for each an array with the shape and dtype of its gradient, even if there is no gradient
    grads: list[Any]  # the current gradients, or `None`


def sorted_parameters(model: Model) -> list[Named]:
    """Return the model's parameters with their names, sorted by name."""
    return sorted(model.namedparams(), key=itemgetter(0))


def select(model: Model, zero_fill: bool) -> Selection:
    """Return the gradients that are to be averaged; a parameter that is not initialised takes no part.

    With ``zero_fill``, an initialised parameter without a gradient takes part, with one of zeros.
    """
    params = sorted_parameters(model)
    try:
        grads = [param.grad for _, param in params]
    except RuntimeError:  # before cleargrad(), Chainer's parameters that are not initialised have no ``grad``
        params = [named for named in params if named[1].data is not None]
        grads = [param.grad for _, param in params]
    if all(grad is not None for grad in grads):
        return Selection(params, grads, grads)
    likes = [param.data if grad is None and zero_fill else grad for (_, param), grad in zip(params, grads, strict=True)]
    chosen = [i for i, like in enumerate(likes) if like is not None]
    return Selection([params[i] for i in chosen], [likes[i] for i in chosen], [grads[i] for i in chosen])


def outline(names: list[str], arrays: Sequence[Any]) -> tuple[object, ...]:
    """Return what the signature of names and arrays depends on.

    For thousands of arrays, it is faster to compare each attribute for all of them than to create an entry for each.
    """
    return names, list(map(_SHAPE, arrays)), list(map(_DTYPE, arrays)), list(map(type, arrays))


# Whether a rank is within a join, and has news for the others; sent with its signature.
_NO_JOIN, _NO_NEWS, _NEWS = range(3)
# The same number in every check, so that two ranks in different operations exchange messages of the same length.
_NOTES = 5


class Agreement:
    """The check that ranks are in the same operation, with the same arrays and settings; cheap if nothing changed."""

    def __init__(self, ranks: Ranks, operation: str) -> None:
        self._ranks = ranks
        self._operation = operation
        self._signature: Signature | None = None
        self._digest = 0

    def check(self, signature: Signature, notes: Sequence[int] = (), join: JoinMessages | None = None) -> list[int]:
        """Raise on every rank if the ranks' signatures differ; otherwise, return their greatest notes; collective.

        It is fastest if the signature is the same object as before. At most five notes (numbers) are passed, and five
        are returned. While a rank has news, all ranks exchange messages, and check once more.

        Raises:
            ValueError: The ranks differ; the same message on all of them.
            RuntimeError: A rank is within a join and another is not (on every rank).
            Exception: An exception like the one that another rank has announced instead of a signature, or the one that
                receiving messages raised.
        """
        if signature is not self._signature:
            self._signature, self._digest = signature, digest((self._operation, signature))
        has_news = True
        while has_news:
            (highest, negative_of_lowest, *greatest), has_news = self._meet(notes, join)
        if highest != -negative_of_lowest:
            raise explain(self._ranks.allgather((self._operation, self._signature)))
        return greatest

    def exchange(self, join: JoinMessages, until_quiet: bool) -> None:
        """Exchange messages at the other ranks' check, once or until no rank has news, without checking; collective."""
        has_news = True
        while has_news:
            has_news = self._meet((), join)[1] and until_quiet

    def _meet(self, notes: Sequence[int], join: JoinMessages | None) -> tuple[list[int], bool]:
        """Return the greatest numbers of all ranks, and whether a rank had news, which all then have; collective."""
        news = _NO_JOIN if join is None else _NEWS if join.has_news else _NO_NEWS
        padding = [0] * (_NOTES - len(notes))
        numbers = np.array([self._digest, -self._digest, *notes, *padding, news, -news], np.int64)
        self._ranks.wait(self._ranks.Iallreduce(MPI.IN_PLACE, numbers, MPI.MAX), "Iallreduce")
        *greatest, loudest, negative_of_quietest = numbers.tolist()
        if loudest > _NO_JOIN and -negative_of_quietest == _NO_JOIN:
            is_within = self._ranks.allgather(join is not None)
            raise RuntimeError(
                f"{self._operation}: expected every rank within join(), or none; got rank "
                f"{is_within.index(True)} within and rank {is_within.index(False)} outside"
            )
        if loudest == _NEWS:
            assert join is not None
            join.receive(self._ranks.allgather(join.message))
        return greatest, loudest == _NEWS


def expect_same_arrays(
    ranks: Ranks, operation: str, named_arrays: Iterable[tuple[str, Any]], join: JoinMessages | None = None
) -> None:
    """Check once, as :class:`Agreement`, that ranks do the same with the same names, shapes and dtypes; collective."""
    Agreement(ranks, operation).check(signature_of(named_arrays), join=join)
