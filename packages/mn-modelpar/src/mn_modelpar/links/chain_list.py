"""A list of links that receive from, and send to, other ranks."""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np

from mn_comm import CommunicatorBase
from mn_modelpar.callsite import on_behalf_of
from mn_modelpar.functions.point_to_point import receive, send
from mn_modelpar.functions.pseudo_connect import connect
from mn_modelpar.links.copying import deepcopy_sharing
from mn_modelpar.staging import put_on
from mn_modelpar.traffic import expect_lasting
from mn_modelpar.values import has_floats, is_array, spec_of

Ranks = int | Sequence[int] | None
Thread: TypeAlias = Any
"""The last Variable of the graph so far: the backward pass must reach it after everything that is added later."""


class Route(NamedTuple):
    """Where the inputs of a link come from and its outputs go to; ``None`` for those of the whole model."""

    rank_in: tuple[int, ...] | None
    rank_out: tuple[int, ...] | None


class MultiNodeChainList(chainer.ChainList):  # type: ignore[misc]  # Chainer has no types
    """The links of a model on this rank, each of which receives from some ranks and sends to others.

    The links run in the order in which they were added, and their backward passes in the reverse order: all sends and
    receives of a rank are connected. So no delegate variable is needed, and the backward pass reaches every link,
    whether its outputs are used or not.

    Args:
        comm: The ranks that the model spans.

    Example:
        >>> model = chainermn.MultiNodeChainList(comm)
        >>> if comm.rank == 0:
        ...     model.add_link(L.Linear(4, 3), rank_in=None, rank_out=1)
        ... else:
        ...     model.add_link(L.Linear(3, 2), rank_in=0, rank_out=None)
        >>> with chainer.no_backprop_mode():
        ...     y = model(np.ones((5, 4), np.float32))
        >>> y.shape if comm.rank == 1 else (5, 2)
        (5, 2)
    """

    _in_forward = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _marked(cls.forward)  # type: ignore[method-assign]

    def __init__(self, comm: CommunicatorBase) -> None:
        expect_lasting(comm)
        super().__init__()
        self._comm = comm
        self._routes: list[Route] = []

    def add_link(self, link: chainer.Link, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Add a link.

        Args:
            link: The link. Its inputs are the received values, one argument for each rank, which is a tuple if several
                Variables were sent; or the inputs of the whole model. Its output is a Variable, an array, or a tuple of
                these. If no other rank receives the output, it may also contain dicts, at any depth.
            rank_in: The rank or ranks to receive from, which may include this one: then the inputs are those that an
                earlier link sent to this rank. ``None`` if the inputs are those of the model.
            rank_out: The rank or ranks to send the output to, which may include this one. ``None`` if the output is
                that of the model; only one link may have it.

        Raises:
            TypeError: ``rank_in`` or ``rank_out`` is neither an integer, nor a list of them, nor ``None``.
            ValueError: A rank is out of range, or another link already has the output of the model.
        """
        route = Route(self._ranks(rank_in, "rank_in"), self._ranks(rank_out, "rank_out"))
        if route.rank_out is None and any(other.rank_out is None for other in self._routes):
            raise ValueError("expected at most one link with rank_out=None, the output of the model, got a second one")
        super().add_link(link)
        self._routes.append(route)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call ``forward``, which a subclass may define; from there, run the links."""
        # In the old ChainerMN this ran the links: the forward() of a subclass calls super().__call__() for it.
        return MultiNodeChainList.forward(self, *inputs) if self._in_forward else super().__call__(*inputs, **kwargs)

    def forward(self, *inputs: Any) -> Any:
        """Run the links; every rank that they communicate with must run its links as well.

        Args:
            inputs: The inputs of the links whose ``rank_in`` is ``None``.

        Returns:
            The output of the link whose ``rank_out`` is ``None``, or, if there is none, an empty Variable from which
            the backward pass can start.

        Raises:
            TypeError: A link returned something else.
            ValueError: A link sent something to this rank itself, but no link receives it, or the reverse.
        """
        own: deque[Any] = deque()
        thread: Thread = None
        output: Any = None
        for index, (link, route) in enumerate(zip(self, self._routes, strict=True)):
            part = f"link {index} ({type(link).__name__}, {_in_words(route)}) of {type(self).__name__}"
            with on_behalf_of(self, part):
                arguments, thread = self._arguments(route.rank_in, inputs, own, thread, part)
                # Even if the link does not use its inputs, or no gradient comes back through them.
                result = _tie(thread, _check(link(*arguments), part))
                if route.rank_out is None:
                    output, thread = result, _end_of(result, thread)
                else:
                    thread = self._dispatch(route.rank_out, result, own, thread)
        if own:
            name = type(self).__name__
            raise ValueError(f"{name}: {len(own)} outputs were sent to this rank itself, but no link receives them")
        if output is None:
            return thread
        return output if _end_of(output, thread) is thread else _tie(thread, output)

    def _arguments(
        self, rank_in: tuple[int, ...] | None, inputs: tuple[Any, ...], own: deque[Any], thread: Thread, part: str
    ) -> tuple[tuple[Any, ...], Thread]:
        """Return the arguments for a link, and where its graph begins."""
        if rank_in is None:
            if thread is None or not inputs or not all(map(is_array, inputs)):
                return inputs, thread
            return connect(thread, *inputs), thread
        arguments = []
        for rank in rank_in:
            if rank == self._comm.rank:
                if not own:
                    raise ValueError(f"{part}: expected an earlier link to have sent something here, got nothing")
                arguments.append(_tie(thread, own.popleft()))
            else:
                *values, thread = receive(self._comm, rank, thread)
                on_device = [put_on(self.device, value) for value in values]
                arguments.append(on_device[0] if len(on_device) == 1 else tuple(on_device))
        return tuple(arguments), thread

    def _dispatch(self, rank_out: tuple[int, ...], result: Any, own: deque[Any], thread: Thread) -> Thread:
        """Send an output to its ranks, one after the other, and return where the graph ends."""
        for position, rank in enumerate(rank_out):
            tied = _tie(thread, result) if position else result
            end = _end_of(tied, None)
            if rank == self._comm.rank:
                own.append(tied)
                thread = thread if end is None else end
            else:
                delegate = send(tied, self._comm, rank)
                # Through a value that needs no gradient, the backward pass would not reach earlier links.
                thread = delegate if end is not None or thread is None else connect(thread, delegate)[0]
        return thread

    def _ranks(self, ranks: Ranks, name: str) -> tuple[int, ...] | None:
        if ranks is None:
            return None
        sequence: list[Any] = list(ranks) if isinstance(ranks, (list, tuple, np.ndarray)) else [ranks]
        try:
            checked = tuple(operator.index(rank) for rank in sequence)
        except TypeError:
            raise TypeError(f"expected an integer, a list of integers or None for {name}, got {ranks!r}") from None
        for rank in checked:
            if not 0 <= rank < self._comm.size:
                raise ValueError(f"expected {name} in 0..{self._comm.size - 1}, got {rank}")
        return checked

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeChainList:
        return deepcopy_sharing(self, self._comm, memo)


def _marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the ``forward`` of a subclass so that it is known when it runs."""

    @functools.wraps(forward)
    def call(self: MultiNodeChainList, *args: Any, **kwargs: Any) -> Any:
        outer, self._in_forward = self._in_forward, True
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._in_forward = outer

    return call


def _in_words(route: Route) -> str:
    def one(ranks: tuple[int, ...] | None) -> str:
        return str(ranks[0] if ranks is not None and len(ranks) == 1 else ranks)

    return f"rank_in={one(route.rank_in)}, rank_out={one(route.rank_out)}"


def _check(result: Any, part: str) -> Any:
    for value in _leaves(result):
        if not is_array(value):
            raise TypeError(
                f"{part}: expected it to return chainer.Variables or arrays, or tuples or dicts of them, "
                f"got {value!r:.80}"
            )
    return tuple(result) if isinstance(result, list) else result


def _leaves(values: Any) -> list[Any]:
    """Return the contents of tuples, lists and dicts, at any depth."""
    if isinstance(values, dict):
        values = list(values.values())
    elif not isinstance(values, (tuple, list)):
        return [values]
    return [leaf for value in values for leaf in _leaves(value)]


def _with_leaves(values: Any, leaves: Iterator[Any]) -> Any:
    """Return the same tuples, lists and dicts with different contents."""
    if isinstance(values, dict):
        twin = copy.copy(values)  # whatever kind of dict it is
        twin.update({key: _with_leaves(value, leaves) for key, value in values.items()})
        return twin
    if isinstance(values, (tuple, list)):
        made = [_with_leaves(value, leaves) for value in values]
        return values._make(made) if hasattr(values, "_make") else type(values)(made)
    return next(leaves)


def _leads_back(value: Any) -> bool:
    """Whether a gradient can be passed back through an object."""
    return isinstance(value, chainer.Variable) and has_floats(spec_of(value))


def _tie(thread: Thread, values: Any) -> Any:
    """Return the same values, but such that a backward pass through any Variable of floats also reaches ``thread``."""
    leaves = _leaves(values)
    ends = [value for value in leaves if _leads_back(value)]
    if thread is None or not ends:
        return values
    tied = iter(connect(thread, *ends))
    return _with_leaves(values, iter([next(tied) if _leads_back(value) else value for value in leaves]))


def _end_of(values: Any, thread: Thread) -> Thread:
    """Return the last Variable of floats, or ``thread`` if there is none."""
    return next((value for value in reversed(_leaves(values)) if _leads_back(value)), thread)
