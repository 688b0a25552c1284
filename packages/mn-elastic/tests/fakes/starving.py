"""Leaves hardly any time to the threads of a process, except for its first one: python starving.py PROCESS."""

import os
import sys
import time

SECONDS = 5


def starve(process: int, core: int) -> None:
    """Give the threads of a process what a busy core has left, for a few seconds."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for thread in {int(name) for name in os.listdir(f"/proc/{process}/task")} - {process}:
            os.sched_setaffinity(thread, {core})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(0.002)


def keep_busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and os.getppid() != 1:
        pass


if __name__ == "__main__":
    core = min(os.sched_getaffinity(0))
    if os.fork() == 0:
        keep_busy(core)
        os._exit(0)
    print("ready", flush=True)
    try:
        starve(int(sys.argv[1]), core)
    except OSError:  # the process or one of its threads has ended
        pass
