"""What has to be done around a fork of the process, for one fork at a time.

Python warns, since 3.12, of a fork while threads run, and rightly: the child would not have them. So threads end before
a fork, and start again after it. But several threads of a program may fork at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["around_forks", "no_fork"]

no_fork = threading.RLock()
"""Held during a fork; to be held where it must not come between."""

_Function = Callable[[], object]


class _Around(NamedTuple):
    before: _Function
    after_in_parent: _Function
    after_in_child: _Function


_all: list[_Around] = []


def around_forks(*, before: _Function, after_in_parent: _Function, after_in_child: _Function) -> None:
    """Have functions called around each fork, as by :func:`os.register_at_fork`, which no other fork comes between.

    Args:
        before: Called before the fork, those that were given last first.
        after_in_parent: Called after it in the parent.
        after_in_child: Called after it in the child.
    """
    _all.append(_Around(before, after_in_parent, after_in_child))


def _before() -> None:
    no_fork.acquire()
    for each in reversed(_all):
        each.before()


def _after_in_parent() -> None:
    try:
        for each in list(_all):
            each.after_in_parent()
    finally:
        no_fork.release()


def _after_in_child() -> None:
    try:
        for each in list(_all):
            each.after_in_child()
    finally:
        no_fork.release()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
