"""``/dev/shm``, where MPI libraries, NCCL and data loaders keep memory that processes share."""

from __future__ import annotations

import os
import shutil
import time
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
_NEW_SECONDS = 60
_SHOWN = 3
_SMALL = 64 * MEBI  # the default size in a container


def check(
    options: Options, folder: Path = Path("/dev/shm"), usage: Callable[[Path], Any] = shutil.disk_usage
) -> Iterator[Check]:
    """Check the size of ``/dev/shm``, and look for files that aborted jobs have left there.

    Args:
        options: How many ranks share it, and whether to remove leftover files.
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
    yield from _leftovers(folder, options.fix)


def _leftovers(folder: Path, fix: bool) -> Iterator[Check]:
    # Files of other users' jobs may be in use; without permission to inspect their processes, this cannot be
    # determined. A file that was just created may be mapped a moment later.
    me, now = os.getuid(), time.time()
    found = {path: status for path in folder.glob("mpich_shm_*") if (status := _status(path)) is not None}
    mapped = _mapped_files() if found else set()
    left = {
        path: status.st_size
        for path, status in sorted(found.items())
        if str(path) not in mapped and me in (0, status.st_uid) and now - status.st_mtime > _NEW_SECONDS
    }
    if not left:
        return
    names = [path.name for path in left]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    what = f"{len(left)} files of jobs that have ended, {_mebi(sum(left.values()))}: {shown}"
    if fix:
        for path in left:
            path.unlink(missing_ok=True)
        yield ok(GROUP, "left behind", f"removed {what}")
    else:
        yield problem("shm-leftovers", GROUP, "left behind", what)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file; ``None`` if a job that has just ended has removed it."""
    try:
        return path.stat()
    except OSError:
        return None


def _mapped_files() -> set[str]:
    """Return the files that are mapped by processes which this user may inspect."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[-1] for line in lines if "mpich_shm_" in line}
    return found


def _mebi(size: int) -> str:
    return f"{size / MEBI:,.0f} MiB"
