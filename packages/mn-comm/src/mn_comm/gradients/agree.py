"""Steps 1 and 2: select gradients, and check that all ranks have the same ones; otherwise, all ranks raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mn_comm.basis.mpi import MPI
from mn_comm.basis.placement import is_device_array
from mn_comm.basis.protocols import Model, Parameter
from mn_comm.ranks.agreement import digest, everywhere, first_other, remote_error

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks

__all__ = [
    "FAILURE",
    "ON_DEVICE",
    "OWNERS",
    "Agreement",
    "Entry",
    "JoinMessages",
    "Named",
    "Selection",
    "Signature",
    "first_difference",
    "outline",
    "select",
    "signature_of",
    "sorted_parameters",
]

Named = tuple[str, Parameter]
Entry = tuple[Any, ...]
"""Name, shape and dtype of an array; both are ``None`` for one that is missing, and ``ON_DEVICE`` follows for one on a
device. More strings may follow, which must be the same, too. For a setting its name and value; for an exception that
was raised instead, ``FAILURE``, its type and its text."""
Signature = tuple[Entry, ...]

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")

ON_DEVICE = "on a device"
FAILURE = "failure"
OWNERS = "owners of means"


class Selection(NamedTuple):
    """The gradients that take part, sorted by name.

    Attributes:
        params: Names and parameters.
        likes: For each parameter an array with the shape and dtype of its gradient, even if there is no gradient.
        grads: The current gradients, or ``None``.
    """

    params: list[Named]
    likes: list[Any]
    grads: list[Any]


def sorted_parameters(model: Model) -> list[Named]:
    """Return the model's parameters with their names, sorted by name."""
    return sorted(model.namedparams(), key=itemgetter(0))


def select(model: Model, zero_fill: bool) -> Selection:
    """Return the gradients that are to be averaged.

    Args:
        model: The model; a parameter that is not initialised takes no part.
        zero_fill: Whether an initialised parameter without a gradient takes part, with one of zeros.
    """
    params = sorted_parameters(model)
    try:
        grads = [param.grad for _, param in params]
    except (
        RuntimeError
    ):  # Chainer's parameters that are not initialised have no ``grad`` attribute before cleargrad() was called
        params = [named for named in params if named[1].data is not None]
        grads = [param.grad for _, param in params]
    if all(grad is not None for grad in grads):
        return Selection(params, grads, grads)
    likes = [param.data if grad is None and zero_fill else grad for (_, param), grad in zip(params, grads, strict=True)]
    chosen = [i for i, like in enumerate(likes) if like is not None]
    return Selection([params[i] for i in chosen], [likes[i] for i in chosen], [grads[i] for i in chosen])


def signature_of(named_arrays: Iterable[tuple[str, Any]]) -> Signature:
    """Return the signature of names and arrays (or ``None``)."""
    plain = np.ndarray
    return tuple(
        [
            (name, array.shape, array.dtype) if type(array) is plain else _entry(name, array)
            for name, array in named_arrays
        ]
    )


def outline(names: list[str], arrays: Sequence[Any]) -> tuple[object, ...]:
    """Return what the signature of names and arrays depends on.

    For thousands of arrays, it is faster to compare each attribute for all of them than to create an entry for each.
    """
    return names, list(map(_SHAPE, arrays)), list(map(_DTYPE, arrays)), list(map(type, arrays))


def _entry(name: str, array: Any) -> Entry:
    if array is None:
        return (name, None, None)
    return (name, array.shape, array.dtype, *([ON_DEVICE] if is_device_array(array) else []))


class JoinMessages(Protocol):
    """The messages of a rank to the others within a join; they are exchanged together with the check.

    Attributes:
        has_news: Whether it has a message to send.
        message: The message; anything that can be pickled.
        factor: The factor by which its owner multiplies the means; 0 if nothing is done with them.
    """

    @property
    def has_news(self) -> bool: ...  # noqa: D102
    @property
    def message(self) -> Any: ...  # noqa: D102
    @property
    def factor(self) -> float: ...  # noqa: D102
    def receive(self, messages: Sequence[Any]) -> None:
        """Process the messages of all ranks; called on every rank if one has news. May raise, on all ranks alike."""


# Whether a rank is within a join, and has news for the others; sent with its signature.
_NO_JOIN, _NO_NEWS, _NEWS = range(3)
# The same number in every check, so that two ranks in different operations exchange messages of the same length.
_NOTES = 5


class Agreement:
    """The check that all ranks do the same with the same arrays and settings; cheap while these do not change.

    Args:
        ranks: The ranks that must agree.
        operation: The name of the operation; a rank in another one is a difference, too.
    """

    def __init__(self, ranks: Ranks, operation: str) -> None:
        self._ranks = ranks
        self._operation = operation
        self._signature: Signature | None = None
        self._digest = 0

    def check(self, signature: Signature, notes: Sequence[int] = (), join: JoinMessages | None = None) -> list[int]:
        """Raise on every rank if the ranks' signatures differ; collective.

        While a rank has news, all ranks exchange messages, and check once more.

        Args:
            signature: This rank's; fastest if it is the same object as before.
            notes: At most five numbers, of which every rank gets the greatest.
            join: The messages to the other ranks, if any.

        Returns:
            The greatest notes of all ranks; five numbers.

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
            raise _explain(self._ranks.allgather((self._operation, self._signature)))
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


def _explain(found: Sequence[tuple[str, Signature]]) -> Exception:
    """Return the exception for ranks that differ in their operations or signatures."""
    operations, signatures = zip(*found, strict=True)
    for rank, signature in enumerate(signatures):
        if signature and signature[0][0] == FAILURE:
            return remote_error(rank, *signature[0][1:])
    if len(set(operations)) > 1:
        return everywhere(_different_operations(operations, signatures))
    return everywhere(_difference(operations[0], signatures))


def _different_operations(operations: Sequence[str], signatures: Sequence[Signature]) -> ValueError:
    rank = first_other(operations)
    here, there = ({name for name, *_ in signatures[i] if str(name).startswith("/")} for i in (0, rank))
    # If a parameter was added on one rank, that rank distributes its parameters, while the others average gradients.
    names = sorted(here ^ there) if here and there else []
    only = f": only rank {0 if names[0] in here else rank} has the parameter {names[0]}" if names else ""
    return ValueError(
        f"expected all ranks in the same operation, got {operations[0]} on rank 0 and {operations[rank]} on rank "
        f"{rank}{only}"
    )


def _difference(operation: str, signatures: Sequence[Signature]) -> ValueError:
    rank = first_other(signatures)
    expected, got = first_difference(signatures[0], signatures[rank])
    if expected is not None and got is not None and len(expected) == len(got) == 2:
        name, value = got
        if name == OWNERS:
            notes = [each and each[1] for each in (expected[1], value)]
            return ValueError(
                f"{operation}: expected the same owners of means on every rank, got {notes[0] or 'none'} on rank 0 and "
                f"{notes[1] or 'none'} on rank {rank}: the optimizer, its hooks and debug mode must be the same"
            )
        return ValueError(
            f"{operation}: expected the same {name} on every rank, got {expected[1]} on rank 0 and {value} on rank "
            f"{rank}: set_config must be called on every rank alike"
        )
    name = min(entry[0] for entry in (expected, got) if entry is not None)
    return ValueError(
        f"{operation}: expected the same parameters on every rank, but rank {rank} differs from rank 0, "
        f"first at {name}: {_describe(expected, name)} on rank 0, {_describe(got, name)} on rank {rank}"
    )


def first_difference(one: Signature, other: Signature) -> tuple[Any, Any]:
    """Return the entries, or ``None``, at the first position in which two different signatures differ."""
    return next((a, b) for a, b in zip_longest(one, other) if repr(a) != repr(b))


def _describe(entry: Entry | None, name: str) -> str:
    if entry is None or entry[0] != name:
        return "missing"
    _, shape, dtype, *place = entry
    return "not initialised" if shape is None else " ".join([f"shape {shape} and dtype {dtype}", *place])
