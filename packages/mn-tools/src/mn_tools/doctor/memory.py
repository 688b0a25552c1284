"""``/dev/shm``, where MPI libraries, NCCL and data loaders keep memory that processes share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

__all__ = ["check"]

GROUP = "Memory"
MEBI = 1 << 20
_PER_RANK = 8 * MEBI  # MPICH uses 1 to 4 MB for each rank, NCCL about as much
_SMALL = 64 * MEBI  # the default size in a container


def check(
    options: Options, folder: Path = Path("/dev/shm"), usage: Callable[[Path], Any] = shutil.disk_usage
) -> Iterator[Check]:
    """Check the size of ``/dev/shm``.

    Args:
        options: How many ranks share it.
        folder: The mount point.
        usage: Returns the total size and the free size, in bytes.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield problem("shm-missing", GROUP, str(folder), "it does not exist, or is not writable", folder=folder)
        return
    room = usage(folder)
    found = f"{_mebi(room.free)} free of {_mebi(room.total)}"
    if room.free < options.ranks * _PER_RANK:
        found += f"; {options.ranks} ranks may need {_mebi(options.ranks * _PER_RANK)}"
        yield problem("shm-full", GROUP, str(folder), found, folder=folder)
    elif room.total <= _SMALL:
        found += "; jobs that share more than this end with SIGBUS"
        yield problem("shm-small", GROUP, str(folder), found)
    else:
        yield ok(GROUP, str(folder), found)


def _mebi(size: int) -> str:
    return f"{size / MEBI:,.0f} MiB"
