"""Signal handlers of the script, which may raise between any two lines, are deferred where that must not happen."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found,unused-ignore]
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

# Nobody handles the others, which are errors, or signals by number.
_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
    *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGCHLD, signal.SIGXCPU, signal.SIGCONT, signal.SIGTSTP),
)


@contextlib.contextmanager
def deferred(*others: object) -> Iterator[None]:
    """Return a context in which no signal handler of the script runs: what has arrived is handled afterwards.

    In threads other than the main one, where Python runs no handlers, it does nothing.

    Args:
        others: Handlers that may still run, because they do not raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before: dict[int, Callable[..., object]] = {}
    try:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)  # the public function takes ten times as long
            if callable(handler) and handler not in others:
                before[number] = handler
                signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        _restore(before, list(dict.fromkeys(arrived)))


def _restore(before: dict[int, Callable[..., object]], arrived: list[int]) -> None:
    """Restore handlers, then call them, all of them even if one raises."""
    try:
        for number in list(before):
            signal.signal(number, before[number])
            del before[number]
        while arrived:
            signal.raise_signal(arrived.pop(0))
    except BaseException:
        _restore(before, arrived)
        raise
