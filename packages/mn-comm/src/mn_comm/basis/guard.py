"""What watches over this process, if the package for it is installed: mn-guard.

This package exchanges arrays. What happens when a process ends, dies or hangs is another package's business, to which
it speaks only here. Without one, creating a communicator starts no thread and no process, and installs no hook and no
handler.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# Found by its name: looking for an entry point would take longer than everything else that creates a communicator.
_PACKAGE = "mn_guard"


class Guard:
    """What watches over a process: this one only calls functions at exit, as Python does; mn-guard has another."""

    def initializing(self) -> AbstractContextManager[None]:
        """MPI is initialised within this context, which may wait for other ranks."""
        return contextlib.nullcontext()

    def started(self) -> None:
        """A communicator is about to be created; MPI runs. Not collective."""

    def settled(self, within: Any) -> None:
        """The ranks of a node are known; collective within the node, for each MPI communicator of the script."""

    def watch(self, ranks: Any) -> None:
        """A private communicator was made, on which no other messages are sent; not collective."""

    def leave(self, ranks: Any) -> None:
        """A private communicator is about to be freed; not collective."""

    def before_exit(self, function: Callable[[], object]) -> None:
        """Call a function when the process ends, while MPI still runs, unless its exit status ends all ranks.

        It is not called in forked children, which have none of this process's threads.
        """
        atexit.register(_call_in, os.getpid(), function)


_found: list[Guard] = []
# What was registered before a communicator or MPI needed a guard, for example by a thread of this package that was
# started before. A guard begins to watch, and to order what happens at exit, when it is found: not earlier.
_early: list[Callable[[], object]] = []


def guard() -> Guard:
    """Return what watches over this process; the first call looks for it."""
    if not _found:
        is_installed = importlib.util.find_spec(_PACKAGE) is not None
        _found.append(importlib.import_module(f"{_PACKAGE}.guard").Guard() if is_installed else Guard())
        for function in _early:
            _found[0].before_exit(function)
        _early.clear()
    return _found[0]


def at_exit(function: Callable[[], object]) -> None:
    """Register a function to be called when the process ends, unless its exit status ends all ranks.

    For functions that wait for other ranks: these may be waiting for this rank, so its exit status is checked before.
    """
    if _found:
        _found[0].before_exit(function)
    else:
        if not _early:
            atexit.register(_call_in, os.getpid(), _end_without_a_guard)
        _early.append(function)


def _call_in(process: int, function: Callable[[], object]) -> None:
    if os.getpid() == process:
        function()


def _end_without_a_guard() -> None:
    """Call what no guard has taken over, because there was no communicator: all, also if one raises."""
    with contextlib.ExitStack() as stack:
        for function in _early:
            stack.callback(function)
