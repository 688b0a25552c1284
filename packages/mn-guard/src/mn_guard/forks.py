"""Functions to call before and after a fork of the process, for one fork at a time.

A forked child that reaches the end of the program finalises MPI, as a rank does. It prints a warning about this.

Since 3.12, Python warns of a fork while threads run, because the child does not have these threads. So threads end
before a fork, and start again after it. But several threads of a program may fork at the same time.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["around_forks", "warn_of_children_that_end"]

_one_fork = threading.RLock()

_Function = Callable[[], object]


class _Around(NamedTuple):
    before: _Function
    after_in_parent: _Function
    after_in_child: _Function


_all: list[_Around] = []


def _nothing() -> None: ...


def around_forks(
    *, before: _Function = _nothing, after_in_parent: _Function = _nothing, after_in_child: _Function = _nothing
) -> None:
    """Register functions to be called around each fork, like :func:`os.register_at_fork`, for one fork at a time.

    Args:
        before: Called before the fork, in reverse order of registration.
        after_in_parent: Called after the fork in the parent.
        after_in_child: Called after the fork in the child.
    """
    _all.append(_Around(before, after_in_parent, after_in_child))


@functools.cache
def warn_of_children_that_end(name: str) -> None:
    """From now on, let each forked child print a warning if it reaches the end of the program.

    At the end of the program, mpi4py finalises MPI, even in a child, where ``MPI_Finalize`` may wait forever. Workers
    of :mod:`multiprocessing` end before that.

    Args:
        name: The name of this process in the warning.
    """
    around_forks(after_in_child=lambda: atexit.register(_warn, name, os.getpid()))


def _warn(name: str, process: int) -> None:
    if os.getpid() == process:  # its own children print the warning themselves
        sys.stderr.write(
            f"[chainermn] process {process}, a child of {name}, has reached the end of the program, where mpi4py calls "
            "MPI_Finalize, which may wait forever: end a child of os.fork with os._exit, or start it with "
            "multiprocessing\n"
        )
        sys.stderr.flush()


def _before() -> None:
    _one_fork.acquire()
    for each in reversed(_all):
        each.before()


def _after_in_parent() -> None:
    try:
        for each in list(_all):
            each.after_in_parent()
    finally:
        _one_fork.release()


def _after_in_child() -> None:
    try:
        for each in list(_all):
            each.after_in_child()
    finally:
        _one_fork.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
