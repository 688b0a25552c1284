"""InfiniBand, and whether processes that use it may fork, as with Chainer's ``MultiprocessIterator``."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

GROUP = "Network"
VARIABLES = "RDMAV_FORK_SAFE", "IBV_FORK_SAFE"
# The values of enum ibv_fork_status, libibverbs.
DISABLED, ENABLED, UNNEEDED = 0, 1, 2
_LITTLE = 64 << 20


def fork_status() -> int:
    """Ask libibverbs; versions before 35 cannot answer, which counts as "disabled"."""
    try:
        return int(ctypes.CDLL("libibverbs.so.1").ibv_is_fork_initialized())
    except (OSError, AttributeError):
        return DISABLED


def locked_memory() -> int:
    """Return how many bytes a process may lock, as memory for a network card must be; -1 for no limit."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def check(
    options: Options,
    folder: Path = Path("/sys/class/infiniband"),
    environ: Mapping[str, str] = os.environ,
    status: Callable[[], int] = fork_status,
    limit: Callable[[], int] = locked_memory,
) -> Iterator[Check]:
    """Look for InfiniBand cards, and check their requirements.

    Args:
        options: Not used.
        folder: The folder in which Linux lists the cards.
        environ: The environment.
        status: Returns the setting of libibverbs for forks.
        limit: Returns how much memory may be locked.
    """
    cards = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not cards:
        yield ok(GROUP, "InfiniBand", "no card here")
        return
    yield _fork(", ".join(cards), environ, status())
    locked = limit()
    if 0 <= locked < _LITTLE:
        yield problem("infiniband-memlock", GROUP, "locked memory", f"only {locked >> 10} KiB may be locked")


def _fork(cards: str, environ: Mapping[str, str], status: int) -> Check:
    # libibverbs checks whether one of them is set, not its value.
    by_variable = [name for name in VARIABLES if name in environ]
    if status == UNNEEDED:
        return ok(GROUP, "InfiniBand", f"{cards}; this kernel makes forks safe")
    if status == ENABLED or by_variable:
        return ok(GROUP, "InfiniBand", f"{cards}; forks are made safe by {' and '.join(by_variable) or 'libibverbs'}")
    found = f"{cards}; a process that communicates and forks may crash, or receive wrong data"
    return problem("infiniband-fork", GROUP, "InfiniBand", found)
