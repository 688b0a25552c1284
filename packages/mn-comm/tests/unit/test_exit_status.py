"""Which ends of a program are told to the other ranks, on every version of Python."""

import subprocess
import sys

import pytest

SCRIPT = """
import argparse, sys, threading
from mn_comm import exit_status
exit_status._GRACE_SECONDS = 0
exit_status.share_exit_status(3)
def end(status):
    local = [status]
    sys.exit(status)
def numbers():
    yield 1
    sys.exit(6)
{}
"""

TOLD = {
    "end(3)": 3,
    "sys.exit('a message')": 1,
    "try:\n    end(4)\nfinally:\n    x = 1": 4,
    "try:\n    end(4)\nexcept BaseException:\n    raise": 4,
    "try:\n    end(4)\nfinally:\n    sys.exit(5)": 5,
    "for _ in numbers():\n    pass": 6,
    "argparse.ArgumentParser().parse_args(['--nonsense'])": 2,
}
NOT_TOLD = {
    "pass": 0,
    "end(0)": 0,
    "end(None)": 0,
    "raise KeyError": 1,
    "try:\n    end(4)\nexcept SystemExit:\n    pass": 0,
    "try:\n    end(4)\nexcept SystemExit as error:\n    kept = error": 0,
    "try:\n    end(4)\nfinally:\n    sys.exit(0)": 0,
    "try:\n    try:\n        end(4)\n    except SystemExit as error:\n        raise ValueError from error\n"
    "except ValueError:\n    pass": 0,
    "thread = threading.Thread(target=end, args=(4,)); thread.start(); thread.join()": 0,
}


@pytest.mark.parametrize("code", [*TOLD, *NOT_TOLD])
def test_ends(code):
    process = subprocess.run([sys.executable, "-c", SCRIPT.format(code)], capture_output=True, text=True)
    status = {**TOLD, **NOT_TOLD}[code]
    assert process.returncode == status, process.stderr
    told = f"chainermn: exit status {status} on rank 3 ("
    assert (told in process.stderr) == ("chainermn" in process.stderr) == (code in TOLD), process.stderr
