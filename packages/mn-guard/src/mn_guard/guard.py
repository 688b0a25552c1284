"""The six calls by which mn-comm lets this package watch over a process; see :mod:`mn_comm.basis.guard`.

Nothing here is imported before it is needed: the first call comes before MPI is initialised.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mn_comm.basis.mpi import MPI
from mn_guard.exit_sequence import Step, at_exit
from mn_guard.starting import watched_start

if TYPE_CHECKING:
    from mn_comm.ranks.intracomm import Ranks


class Guard:
    """What watches over this process; mn-comm creates it when MPI is initialised, or with the first communicator."""

    def initializing(self) -> AbstractContextManager[None]:
        """Let it be said if ``MPI_Init`` does not return."""
        return watched_start()

    def started(self) -> None:
        """Let an uncaught exception, an exit status and Ctrl-C end all ranks; watch; report to a supervisor."""
        from mn_guard import stall
        from mn_guard.exit_status import share_exit_status
        from mn_guard.global_except_hook import add_hook_by_default
        from mn_guard.supervised import link

        add_hook_by_default()
        if link.supervision() is not None:  # which restarts a job whose exit status is not 0
            from mn_guard.supervised import report

            share_exit_status(MPI.COMM_WORLD.rank)
            report.join(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        if MPI.COMM_WORLD.size > 1:  # a rank may have ended already, without a communicator
            stall.start()

    def settled(self, within: Ranks) -> None:
        """Let deaths be reported, and messages that nobody receives; collective within the node."""
        from mn_guard.crash_output import speak_when_ended
        from mn_guard.leftovers import receive_leftovers_at_exit

        speak_when_ended(within)
        receive_leftovers_at_exit()

    def watch(self, ranks: Ranks) -> None:
        """Let the stall monitor ask and answer on a private communicator."""
        from mn_guard import stall

        stall.join(ranks)

    def leave(self, ranks: Ranks) -> None:
        """Leave a private communicator, which is about to be freed."""
        from mn_guard import stall

        stall.leave(ranks)

    def before_exit(self, function: Callable[[], object]) -> None:
        """Call a function that ends tasks, or collects what they have recorded, when the process ends."""
        at_exit(Step.TASKS, function)
