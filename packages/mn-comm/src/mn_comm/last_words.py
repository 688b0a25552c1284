"""What a rank was doing when the job is ended around it.

If one rank dies, the launcher ends the others; a scheduler ends all of them when their time is over. Where that comes
as SIGTERM (Open MPI, Slurm, Kubernetes, a plain ``kill``), each rank writes where its main thread is, which names the
operation that it waited in; Python's own handlers could not, as they do not run inside MPI. MPICH's ``mpiexec`` sends
SIGKILL, after which nobody says anything.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys

__all__ = ["speak_when_ended"]


@functools.cache
def speak_when_ended() -> None:
    """From now on, let SIGTERM write a traceback to stderr before it ends the process, as it would without.

    Where the program has a handler of its own for it, nothing is done; one that it installs later replaces this.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or sys.__stderr__ is None:
        return
    try:
        faulthandler.register(signal.SIGTERM, sys.__stderr__, all_threads=False, chain=True)
    except (OSError, ValueError, RuntimeError):  # there is no file behind it
        return
    # The workers of a pool are ended by SIGTERM every time, and nobody wants to hear of it.
    os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    faulthandler.unregister(signal.SIGTERM)
