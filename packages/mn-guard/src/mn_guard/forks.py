"""Functions to call before and after a fork of the process, for one fork at a time.

A forked child that reaches the end of the program finalises MPI, as a rank does. It prints a warning about this.

Since 3.12, Python warns of a fork while threads run, because the child does not have these threads. So threads end
before a fork, and start again after it. But several threads of a program may fork at the same time.

A pool ends its workers by SIGTERM, maybe before their first instruction. A signal for which a handler of these packages
is installed is blocked during a fork, so that it finds the child without this handler.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable

one_fork = threading.RLock()
"""Held during each fork, including the functions around it."""

_Function = Callable[[], object]

_before: list[_Function] = []
_in_parent: list[_Function] = []
_in_child: list[_Function] = []
_ours: dict[int, object] = {}
_this_thread = threading.local()


def around_forks(
    *,
    before: _Function | None = None,
    after_in_parent: _Function | None = None,
    after_in_child: _Function | None = None,
) -> None:
    """Register functions to be called around each fork, like :func:`os.register_at_fork`, for one fork at a time.

    Args:
        before: Called before the fork, in reverse order of registration; a second time if it raises.
        after_in_parent: Called after the fork in the parent; a second time if it raises.
        after_in_child: Called after the fork in the child.
    """
    for functions, function in ((_before, before), (_in_parent, after_in_parent), (_in_child, after_in_child)):
        if function is not None:
            functions.append(function)


def block_during_forks(number: int, handler: object) -> None:
    """From now on, block a signal during each fork, while it has a certain handler.

    A handler of the program is not waited for: if it raises, it should do so in the program, not after a fork.

    Args:
        number: The signal.
        handler: The handler, as :func:`signal.getsignal` returns it.
    """
    _ours[number] = handler


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


def _begin() -> None:
    one_fork.acquire()
    # A handler of another signal may raise in each of these lines.
    _this_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {number for number, handler in _ours.items() if signal.getsignal(number) is handler}
    )
    for function in reversed(_before):
        _insist(function)


def _end_in_parent() -> None:
    try:
        _unblock()  # first, because threads that start inherit what is blocked
        for function in list(_in_parent):
            _insist(function)
    finally:
        one_fork.release()


def _end_in_child() -> None:
    try:
        for function in list(_in_child):
            function()
        _unblock()
    finally:
        one_fork.release()


def _insist(function: _Function) -> None:
    """Call a function, and once more if an exception has interrupted it, for example one of a signal handler."""
    try:
        function()
    except BaseException:
        function()
        raise


def _unblock() -> None:
    mask = vars(_this_thread).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(before=_begin, after_in_parent=_end_in_parent, after_in_child=_end_in_child)
