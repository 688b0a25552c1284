"""Which ways to end a program end the other ranks, on every version of Python."""

import subprocess
import sys

import pytest

SCRIPT = """
import argparse, asyncio, atexit, contextlib, gc, sys, threading
from mn_guard import exit_status
exit_status._GRACE_SECONDS = 0
exit_status.abort_when_read = lambda status, summary: print("ends with", status, flush=True)
def begin(result=None):
    exit_status.share_exit_status(3)
    return result
def end(status):
    local = [status]
    sys.exit(status)
def numbers():
    yield 1
    raise SystemExit(6)
async def run():
    end(7)
@contextlib.contextmanager
def context():
    yield
def keep():
    kept = None
    try:
        end(8)
    except SystemExit as error:
        kept = error
    if kept:
        raise kept
def catch():
    try:
        end(4)
    except SystemExit as error:
        return error.with_traceback(None)
{}
"""

ENDS = {
    "begin(); end(3)": 3,
    "begin(); sys.exit('a message')": 1,
    "begin(); raise SystemExit(3)": 3,
    "begin(); exit(3)": 3,
    "begin(); sys.exit(-1)": 255,
    "begin(); sys.exit(2**70)": 255,
    "begin(); sys.exit(2**63 + 256)": 255,
    "begin(); sys.exit(0.0)": 1,
    "begin(); sys.exit([])": 1,
    "begin()\ntry:\n    end(4)\nfinally:\n    x = 1": 4,
    "begin()\ntry:\n    end(4)\nexcept BaseException:\n    raise": 4,
    "begin()\ntry:\n    end(4)\nexcept SystemExit as error:\n    kept = error\n    raise": 4,
    "begin()\ntry:\n    end(4)\nfinally:\n    sys.exit(5)": 5,
    "begin()\nfor _ in numbers():\n    pass": 6,
    "begin(); asyncio.run(run())": 7,
    "begin()\nwith context():\n    end(3)": 3,
    "begin(); keep()": 8,
    "begin(); argparse.ArgumentParser().parse_args(['--nonsense'])": 2,
}
if sys.version_info >= (3, 12):
    ENDS["sys.exit(begin(9))"] = 9
GOES_ON = {
    "begin()": 0,
    "begin(); end(0)": 0,
    "begin(); end(None)": 0,
    "begin(); end(256)": 0,
    "begin(); raise KeyError": 1,
    "begin()\ntry:\n    end(4)\nexcept SystemExit:\n    pass": 0,
    "begin()\ntry:\n    end(4)\nexcept SystemExit as error:\n    kept = error\n    kept.code": 0,
    "begin()\ntry:\n    end(4)\nfinally:\n    sys.exit(0)": 0,
    "begin()\ntry:\n    try:\n        end(4)\n    except SystemExit as error:\n        raise ValueError from error\n"
    "except ValueError:\n    pass": 0,
    "begin(); thread = threading.Thread(target=end, args=(4,)); thread.start(); thread.join()": 0,
    "begin(); kept = catch(); atexit.register(gc.collect)": 0,
    "begin(); atexit.register(catch)": 0,
    "begin(); atexit.register(sys.exit, 3)": 0,
    "begin(); kept = catch(); raise SystemExit(0)": 0,
    "assert SystemExit(5).code == 5; begin(); error = SystemExit(5); error.code += 1; assert error.code == 6": 0,
}


@pytest.mark.parametrize("code", [*ENDS, *GOES_ON])
def test_the_end_of_a_program(code):
    process = subprocess.run([sys.executable, "-c", SCRIPT.replace("{}", code)], capture_output=True, text=True)
    status = {**ENDS, **GOES_ON}[code]
    assert process.returncode == status, process.stderr
    is_end = code in ENDS
    assert process.stdout == (f"ends with {status}\n" if is_end else "")
    assert (f"chainermn: exit status {status} on rank 3 (" in process.stderr) == is_end
