"""``chainermn elastic -n 4 script.py``: runs a job, and starts it again where it fails, on the hosts that are left.

::

    python -m mn_comm elastic -n 4 --hosts a:2,b:2 --min 2 --restart 3 train.py --epoch 20

It starts ``mpiexec``, MPICH's or Open MPI's, with as many ranks as asked for, and waits until the ranks say that they
have come to the end of the script: that is when it ends with status 0, whatever ``mpiexec`` says. Where a rank fails,
or a host is lost, it ends what is left of the job and starts it again, on the hosts that it can still reach; with
``create_communicator(…, elastic=True)`` under Open MPI most failures of single ranks need no restart. On each host a
process of a few megabytes holds what :func:`chainermn.extensions.create_memory_keeper` keeps there: the script goes on
from that.

With ``--spares`` more processes are started, which wait until a rank is lost: then one takes its place, with the state
of another rank. With ``--detect`` a rank that is stopped or cut off counts as lost. Both need Open MPI and
``elastic=True``.

It gives up, with the status that a rank has failed with or else with 1, if fewer than ``--min`` ranks can be started,
if all restarts are used up, or if three attempts in turn have failed and nothing newer was kept meanwhile.
"""

from __future__ import annotations

import sys

from mn_tools.elastic.options import parse

__all__ = ["main"]


def main(arguments: list[str] | None = None, program: str = "mn_comm") -> int:
    """Run a job, and start it again where it fails, on the hosts that are left; return its status.

    Args:
        arguments: The command line.
        program: What the command line is to begin with, in what is said about it.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments, f"python -m {program} elastic", __doc__ or "")
    from mn_tools.elastic.supervisor import Supervisor

    with Supervisor(options) as supervisor:
        return supervisor.run()
