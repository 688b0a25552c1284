"""``chainermn elastic -n 4 script.py``: runs a job, and restarts it on the remaining hosts if it fails.

::

    python -m mn_comm elastic -n 4 --hosts a:2,b:2 --min 2 --restart 3 train.py --epoch 20

It starts the ``mpiexec`` of MPICH or Open MPI with the requested number of ranks, and waits until the ranks report that
they have reached the end of the script, and ``mpiexec`` has ended. Then it ends with status 0. A failure that only
``mpiexec`` knows of also counts, if no rank was lost. If a rank fails or a host is lost, the rest of the job ends, and
is restarted on the hosts that can still be reached. (With Open MPI, ranks notice the loss of another when they
communicate next.) With ``create_communicator(…, elastic=True)`` under Open MPI, most failures of single ranks need no
restart. On each host, a process of a few megabytes holds the state that
:func:`chainermn.extensions.create_memory_keeper` saves, and the script continues from this state.

With ``--spares``, additional processes are started, which wait until a rank is lost. One of them then takes its place,
with the state of another rank. With ``--detect``, a rank that is stopped or cut off counts as lost. Both need Open MPI
and ``elastic=True``.

``--ssh`` names the command that reaches a host, ``--mpiexec`` the launcher with its options, and ``--start-limit`` the
seconds after which ranks that do not all have a communicator are ended and started again.

It gives up if fewer than ``--min`` ranks can be started, if no restarts are left, or if three attempts in a row have
failed without saving a newer state. Its exit status is then that of a failed rank, that of ``mpiexec`` if no rank has
created a communicator, or 1.
"""

from __future__ import annotations

import sys

from mn_elastic.supervision.options import parse

__all__ = ["main"]


def main(arguments: list[str] | None = None, program: str = "mn_comm") -> int:
    """Run a job, and restart it on the remaining hosts if it fails; return its status.

    Args:
        arguments: The command line.
        program: The beginning of the command line, for messages.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments, f"python -m {program} elastic", __doc__ or "")
    from mn_elastic.supervision.supervisor import Supervisor

    with Supervisor(options) as supervisor:
        return supervisor.run()
