"""A thread that can be waited for although signal handlers may raise."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Thread(threading.Thread):
    """A daemon thread that says itself when it has ended.

    Before Python 3.13, a thread counts as ended if a signal handler has raised while it was joined. And a handler that
    raises in a method of an Event or a Condition, which are Python code, can leave it locked forever.

    Args:
        run: What it does.
        name: Its name.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self._running = threading.Lock()
        self._running.acquire()

    def run(self) -> None:
        """Call the function, and note its end; called in the thread."""
        try:
            super().run()
        finally:
            self._running.release()

    def await_end(self) -> None:
        """Wait until it has ended."""
        with self._running:
            pass
        self.join()
