"""Worker processes that Python's multiprocessing starts take no part in MPI.

With the start methods ``spawn`` and ``forkserver`` (Chainer's MultiprocessIterator needs one of them where a fork of an
MPI process may crash) each worker imports the main script again, and with it mpi4py, which would initialise MPI as a
rank that exists already: MPICH ends the job.
"""

from __future__ import annotations

import sys


def is_worker() -> bool:
    """Return whether this process was started by multiprocessing; true also while it still imports the main script."""
    process = sys.modules.get("multiprocessing.process")  # which a worker has imported
    # Its parent is known only afterwards; its name is set before.
    return process is not None and (
        process.parent_process() is not None or process.current_process().name != "MainProcess"
    )


if is_worker():
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
