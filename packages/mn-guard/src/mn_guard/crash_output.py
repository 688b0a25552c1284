"""Messages about what a rank was doing when it died, or when the job was ended.

If one rank dies, the launcher ends the others; a scheduler ends all ranks at the time limit. If they are ended by
SIGTERM (Open MPI, Slurm, Kubernetes, a plain ``kill``), each rank writes where its main thread is, and so in which
operation it was waiting; Python's own handlers do not run inside MPI. In a job of several processes, it writes this to
the process of its node (:mod:`mn_guard.death_reporter`), which prints one line, and also reports ranks that are killed
by a signal that they cannot handle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import os
import signal
import sys
from typing import TYPE_CHECKING

from mn_guard import death_reporter
from mn_guard.forks import around_forks, block_during_forks

if TYPE_CHECKING:
    import socket

    from mn_comm.ranks.intracomm import Ranks

_NOT_THE_SCRIPT = (
    *("mn_comm", "mn_compat", "mn_compress", "mn_elastic", "mn_guard", "mn_data", "mn_extensions", "mn_modelpar"),
    *("mn_optim", "chainermn_meta", "chainer", "cupy", "cupyx", "mpi4py", "numpy"),
)


def speak_when_ended(within: Ranks) -> None:
    """From now on, have it said where this process was when SIGTERM or a fatal error ends it; collective within a node.

    In a job of several processes, the process of the node prints one line. Otherwise, Python writes the stack to
    stderr. If the program has its own handler for SIGTERM, or has enabled faulthandler, that stays as it is; a handler
    that the program installs later replaces this one.

    Args:
        within: The ranks of the node.
    """
    from mpi4py.MPI import COMM_WORLD as world  # not earlier, as below

    reader = death_reporter.connect(within, world.rank, world.size, folders_of_libraries) if world.size > 1 else None
    _write_stacks(reader)


def folders_of_libraries() -> tuple[str, ...]:
    """Return the folders of these packages and of their dependencies, in which the user's script cannot be."""
    found = []
    for name in _NOT_THE_SCRIPT:
        with contextlib.suppress(ImportError, ValueError):  # not installed, or made by a program
            spec = importlib.util.find_spec(name)
            found += [os.path.join(folder, "") for folder in (spec and spec.submodule_search_locations) or ()]
    return tuple(found)


@functools.cache
def _write_stacks(reader: socket.socket | None) -> None:
    stacks = sys.__stderr__ if reader is None else reader
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has no file descriptor
        if reader is not None and not faulthandler.is_enabled():
            faulthandler.enable(reader, all_threads=False)
            around_forks(after_in_child=faulthandler.disable)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and stacks is not None:
            faulthandler.register(signal.SIGTERM, stacks, all_threads=False, chain=True)
            # The workers of a pool are always ended by SIGTERM, so messages about it would only disturb.
            around_forks(after_in_child=functools.partial(faulthandler.unregister, signal.SIGTERM))
            block_during_forks(signal.SIGTERM, signal.SIG_DFL)
