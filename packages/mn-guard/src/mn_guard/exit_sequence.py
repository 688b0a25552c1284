"""What happens when a process ends, in one order.

=========  ============================================================================================================
step       what is done, and why at this place
=========  ============================================================================================================
STATUS     A status other than 0 ends all ranks: before all that may wait for ranks that wait for this one.
LEAVE      An elastic rank asks the others whether they leave, too: before it waits for tasks that may never end.
TASKS      Tasks in background threads end: while the stall monitor still watches what they wait for. Then the timeline,
           if there is one, is collected, which contains them.
REPORT     The supervisor of the job is told that the script has been completed.
LEFTOVERS  Messages that nobody has received are received and reported: before waiting, as their senders may wait.
FAREWELL   The stall monitor stops, and tells its neighbors that this rank takes part in nothing any more.
FINISHED   The process of the node is told that the end of this rank is not a death: last, in case a step above fails.
=========  ============================================================================================================

Python itself, and then mpi4py, which finalises MPI, end after that.
"""

from __future__ import annotations

import atexit
import enum
import os
import sys
from collections.abc import Callable

__all__ = ["Step", "at_exit", "registered", "statuses"]


class Step(enum.IntEnum):
    """The steps, in their order; see the table above."""

    STATUS = 1
    LEAVE = 2
    TASKS = 3
    REPORT = 4
    LEFTOVERS = 5
    FAREWELL = 6
    FINISHED = 7


statuses: list[object] = []
"""The exit statuses that the program has asked for; the last one counts."""
_registered: list[tuple[Step, int, Callable[[], object]]] = []


def at_exit(step: Step, function: Callable[[], object]) -> None:
    """Call a function when this process ends; not in its forked children.

    Args:
        step: When, among the steps. Within one step, what was registered last is called first, as Python does.
        function: The function. If it raises, the traceback is printed, and the other functions are still called, unless
            it raises SystemExit with a status other than 0, which ends all ranks.
    """
    if not _registered:
        atexit.register(_run)
    _registered.append((step, os.getpid(), function))


def registered() -> list[tuple[Step, Callable[[], object]]]:
    """Return the functions that this process will call, in their order."""
    mine = [(step, function) for step, process, function in reversed(_registered) if process == os.getpid()]
    return sorted(mine, key=lambda each: each[0])  # which keeps the order within a step


def _run() -> None:
    functions = [function for _, function in registered()]
    while functions:
        try:
            while functions:
                functions.pop(0)()
        except SystemExit as error:  # for example, a signal handler of the script has raised it
            statuses.append(error.code)
            for step, end in registered():
                if step is Step.STATUS:
                    end()
        except BaseException as error:
            sys.__excepthook__(type(error), error, error.__traceback__)
