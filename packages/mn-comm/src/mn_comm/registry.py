"""The classes of communicators by name: those of this package, and those of other packages.

A package adds a name by an entry point of the group ``mn_comm.strategies``. Its value is a class derived from
:class:`mn_comm.Strategy`, for another way to average; or one derived from :class:`mn_comm.Communicator`, which uses an
existing strategy in another way::

    [project.entry-points."mn_comm.strategies"]
    ring = "their_package:Ring"
    theirs = "their_package:TheirCommunicator"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mn_comm.communicator import Communicator
from mn_comm.communicators import class_of
from mn_comm.gradients.strategies import STRATEGIES, Strategy
from mn_comm.ranks import agreement

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from mpi4py import MPI

GROUP = "mn_comm.strategies"
# No other package can use these names. Strategies of others are added to the table when a rank first uses them.
_OURS = tuple(STRATEGIES)
SPARES = "CHAINERMN_SPARES"  # how many of the processes that the launcher starts wait until a rank is lost
ELASTIC = "mn_elastic"  # the entry point for elastic communicators: a function of an MPI communicator and a class
_has_elastic = False


def kind_of(name: str) -> type[Communicator]:
    """Return the class with a name.

    Raises:
        ValueError: There is no such name, several packages have it, or the class uses a strategy that does not exist.
        TypeError: The entry point refers to something other than a class of communicators or strategies.
        ImportError: It cannot be imported.
    """
    if name in _OURS:
        return class_of(STRATEGIES[name])
    from importlib.metadata import entry_points  # not earlier: it imports much

    others = entry_points(group=GROUP)
    if name not in others.names:
        names = [*_OURS, *sorted(others.names - set(_OURS))]
        raise ValueError(f"expected a communicator's name, one of {', '.join(names)}; got {name!r}")
    return _load(list(others.select(name=name)))


def _load(points: Sequence[EntryPoint]) -> type[Communicator]:
    name, values = points[0].name, sorted({point.value for point in points})
    if len(values) > 1:
        raise ValueError(f"expected one package with a communicator {name!r}, got {', '.join(values)}")
    what = f"the communicator {name!r} of {_package(points[0])}"
    try:
        kind = points[0].load()
    except Exception as error:
        raise ImportError(
            f"{what}: expected {values[0]} to be importable, got {type(error).__name__}: {error}"
        ) from error
    if isinstance(kind, type) and issubclass(kind, Strategy):
        if kind.name != name:
            raise ValueError(f"{what}: expected a strategy with this name, got {kind.name!r}")
        STRATEGIES[name] = kind
        return class_of(kind)
    if not (isinstance(kind, type) and issubclass(kind, Communicator)):
        raise TypeError(f"{what}: expected a class derived from mn_comm.Communicator or mn_comm.Strategy, got {kind!r}")
    if kind.strategy not in STRATEGIES:
        raise ValueError(f"{what}: expected strategy to be one of {', '.join(STRATEGIES)}; got {kind.strategy!r}")
    return kind


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"


def create_elastic(mpi_comm: MPI.Intracomm, kind: type[Communicator]) -> Communicator:
    """Create a communicator that continues without ranks that die, and averages as ``kind`` does; collective."""
    from importlib.metadata import entry_points  # not earlier: it imports much

    with agreement.raise_on_all(mpi_comm):
        points = list(entry_points(group=ELASTIC))
        if not points:
            raise RuntimeError("elastic=True: expected the package mn-elastic, got none: pip install mn-elastic")
        create: Callable[[MPI.Intracomm, type[Communicator]], Communicator] = points[0].load()
    communicator = create(mpi_comm, kind)
    global _has_elastic
    _has_elastic = True
    return communicator


def refuse_spares(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if spares were requested, but the job has no elastic communicator."""
    if environ.get(SPARES, "") not in ("", "0") and not _has_elastic:
        raise ValueError(
            f"expected create_communicator(…, elastic=True) with {SPARES}={environ[SPARES]}, got elastic=False: no "
            "process can take the place of a rank that is lost"
        )
