"""Extensions that run on one rank only."""

from __future__ import annotations

from typing import Any

from chainer.training import Extension

from mn_comm import CommunicatorBase
from mn_comm.building_blocks import MPI


def main_rank_only(extension: Any, comm: CommunicatorBase | None = None, rank: int = 0) -> Any:
    """Return an extension that runs on one rank and does nothing on the others.

    It replaces ``if comm.rank == 0:`` for extensions that print, plot or write files. An extension that communicates
    would wait for the other ranks forever.

    Args:
        extension: An extension, or any function that is used as one.
        comm: The ranks; by default all that ``mpiexec`` started.
        rank: The rank on which to run it.

    Returns:
        On ``rank`` the extension itself, elsewhere one with the same name, trigger and priority.

    Raises:
        ValueError: ``rank`` is out of range.

    Example:
        >>> log = chainermn.extensions.main_rank_only(chainer.training.extensions.LogReport(), comm)
        >>> trainer.extend(log)
    """
    ranks = MPI.COMM_WORLD if comm is None else comm
    if not 0 <= rank < ranks.size:
        raise ValueError(f"expected rank in 0..{ranks.size - 1}, got {rank}")
    return extension if ranks.rank == rank else _Nothing(extension)


class _Nothing(Extension):  # type: ignore[misc]  # Chainer has no types
    """An extension that does nothing, under the name of another, so that the trainers of all ranks are the same."""

    def __init__(self, extension: Any) -> None:
        names = (getattr(extension, attribute, None) for attribute in ("name", "default_name", "__name__"))
        self.name = next((name for name in names if name is not None), None)
        self.trigger = getattr(extension, "trigger", Extension.trigger)
        self.priority = getattr(extension, "priority", Extension.priority)

    def __call__(self, trainer: Any) -> None:
        pass
