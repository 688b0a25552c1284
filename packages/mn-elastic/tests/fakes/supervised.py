"""Runs a script under the supervisor; also contains the script that the tests run."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
import numpy as np
import mn_comm
import mn_elastic

attempt = int(os.environ["CHAINERMN_SUPERVISOR"].split()[-1])
comm = mn_comm.create_communicator("naive", **({"elastic": True} if "elastic" in sys.argv else {}))
first_rank = comm.rank
memory = mn_elastic.NodeMemory()

def say(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)  # one write: ranks share the output

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def count(until, kill=lambda step: None):
    \"\"\"Count to a number, and keep how far it has come after each ten.\"\"\"
    found = memory.get()
    begin, total = (0, np.zeros(2)) if found is None else (found[0], found[1]["total"])
    say(f"attempt {attempt} of {comm.size} begins at {begin} with {total[0]:.0f}")
    for step in range(begin, until):
        kill(step)
        total += mn_comm.transact(comm, lambda: comm.allreduce(np.ones(2))) / comm.size
        if comm.intra_rank == 0 and (step + 1) % 10 == 0:
            memory.put(step + 1, {"total": total, "empty": np.zeros((0, 3))})
    say(f"ends with {total[0]:.0f}")
"""


def changed(*statements):
    """Return a supervisor's program in which statements change something first."""
    imports = "import sys\nfrom mn_comm.__main__ import main\nfrom mn_elastic.supervision import launch, supervisor"
    return "\n".join([imports, *statements, "sys.exit(main(sys.argv[1:]))"])


# It gives the launcher hardly any time to end after all ranks have.
IMPATIENT = changed("supervisor._LAUNCHER_SECONDS = 0.2")


def run(tmp_path, body, *options, arguments=(), seconds=70, before=""):
    """Run code under the supervisor, some of it before MPI is initialized; return how it ended, and its output."""
    return run_script(tmp_path, before + SCRIPT + body, *options, arguments=arguments, seconds=seconds)


def run_script(tmp_path, text, *options, arguments=(), seconds=70, program=("-m", "mn_comm")):
    """Run a script under the supervisor, which a program runs; return how it ended, and its output."""
    script = Path(tmp_path, "script.py")
    script.write_text(text)
    command = [sys.executable, *program, "elastic", *options, str(script), *arguments]
    environ = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ, cwd=tmp_path)
