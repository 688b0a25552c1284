"""One rank of the job that the doctor starts: ``mpiexec -n 2 python -m mn_tools.doctor.probe``.

Each step is announced before it begins, and begins when all ranks have written their results of the one before it, so
that the doctor can name the step in which a rank hangs or dies. The ranks write to files in the folder that the
argument names, if it exists, otherwise to standard output: when a job is aborted, launchers discard output that they
have not passed on yet.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial

from mn_tools.doctor.commands import emit, in_short

FATAL = "point-to-point", "reduction"  # nothing works without them
GRACE = 1.0  # seconds in which a launcher can pass on what was written


def main(folder: str = "") -> None:
    """Initialise MPI, do the exercises, and write the result of each."""
    to = 1
    if os.path.isdir(folder):
        to = os.open(os.path.join(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    at = partial(emit, to=to, pid=f"{os.uname().nodename}:{os.getpid()}", rank=-1)
    at(step="import", state="begin")
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        from mn_tools.doctor import exercises
    except Exception as error:
        at(step="import", state="error", found=in_short(error))
        return
    at(step="init", state="begin")
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    at = partial(at, rank=world.rank)
    at(step="init", state="end", size=world.size, host=MPI.Get_processor_name())
    steps: dict[str, Callable[[MPI.Intracomm], object]] = {
        "direct copies": exercises.direct_copies,
        "point-to-point": exercises.point_to_point,
        "reduction": exercises.reduction,
        "shared memory": exercises.shared_memory,
        "CUDA-aware": exercises.awareness_of_devices,
        "devices": exercises.devices_in_use,
    }
    for step, exercise in steps.items():
        at(step=step, state="begin")
        try:
            at(step=step, state="end", found=exercise(world))
        except Exception as error:
            at(step=step, state="error", found=in_short(error))
            if step in FATAL:
                time.sleep(GRACE)
                world.Abort(1)  # other ranks may be waiting
        # The death of a rank ends the others: without this, it would also be seen in steps that they are late with.
        world.Barrier()
    at(step="end", state="begin")
    MPI.Finalize()
    at(step="end", state="end", found="all ranks ended as they should")


if __name__ == "__main__":
    main(*sys.argv[1:2])
