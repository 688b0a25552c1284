"""``/dev/shm``, where MPI libraries, NCCL and data loaders keep memory that processes share.

Jobs that are killed leave files behind: MPICH's shared memory, and Open MPI's session folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mn_tools.doctor.options import Options
from mn_tools.doctor.problems import problem
from mn_tools.doctor.report import Check, ok

GROUP = "Memory"
MEBI = 1 << 20
_PER_RANK = 8 * MEBI  # MPICH uses 1 to 4 MB for each rank, NCCL about as much
_SMALL = 64 * MEBI  # the default size in a container
_NEW_SECONDS = 60
_SHOWN = 3
# Named after the process that started the job on this host. A later process with this number cannot start one.
_SESSION = re.compile(r"(?:ompi|prted)\.(\d+)")


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


def check_leftovers(
    options: Options, shared: Path = Path("/dev/shm"), temporary: Path | None = None
) -> Iterator[Check]:
    """Look for files that killed jobs have left behind, and remove them if the options say so.

    Args:
        options: Whether to remove the files.
        shared: The folder of MPICH's shared memory.
        temporary: The folder of Open MPI's session folders; by default, the folder for temporary files.
    """
    files = _unused_memory(shared)
    what = f"files of jobs that have ended, {_mebi(sum(files.values()))}"
    yield from _report("shm-leftovers", list(files), what, options.fix)
    folders = _ended_sessions(Path(tempfile.gettempdir()) if temporary is None else temporary)
    yield from _report("session-leftovers", folders, "session folders of Open MPI jobs that have ended", options.fix)


def _report(code: str, left: list[Path], what: str, fix: bool) -> Iterator[Check]:
    if not left:
        return
    names = [path.name for path in left]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    found = f"{len(left)} {what}: {shown}"
    if not fix:
        yield problem(code, GROUP, "left behind", found)
        return
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    yield ok(GROUP, "left behind", f"removed {found}")


def _unused_memory(folder: Path) -> dict[Path, int]:
    # Files of other users' jobs may be in use; without permission to inspect their processes, this cannot be
    # determined. A file that was just created may be mapped a moment later.
    found = _own_and_old(folder.glob("mpich_shm_*"))
    mapped = _mapped_files() if found else set()
    return {path: size for path, size in found.items() if str(path) not in mapped}


def _ended_sessions(folder: Path) -> list[Path]:
    # A container may share the folder, but not the numbers of processes: it has another host name.
    host = socket.gethostname().partition(".")[0]
    found = _own_and_old(path for path in folder.glob("*.*") if _SESSION.fullmatch(path.name))
    return [
        path
        for path in found
        if any(path.glob(f"pmix.{host}*")) and not Path("/proc", path.name.partition(".")[2]).exists()
    ]


def _own_and_old(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the paths that this user may remove, except new ones, sorted, with their sizes."""
    me, now = os.getuid(), time.time()
    found = {}
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # a job that has just ended has removed it
            status = path.stat()
            if me in (0, status.st_uid) and now - status.st_mtime > _NEW_SECONDS:
                found[path] = status.st_size
    return found


def _mapped_files() -> set[str]:
    """Return the files that are mapped by processes which this user may inspect."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[-1] for line in lines if "mpich_shm_" in line}
    return found
