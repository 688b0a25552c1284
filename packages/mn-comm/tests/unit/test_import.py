"""What importing the package imports: little beyond NumPy and mpi4py."""

import subprocess
import sys
import typing
from types import ModuleType

import pytest

import mn_comm
from mn_comm import building_blocks

LOADED = "import sys; print(*sys.modules)"


def loaded(code):
    job = subprocess.run([sys.executable, "-c", f"{code}; {LOADED}"], capture_output=True, text=True, check=True)
    return set(job.stdout.split())


def test_nothing_heavy_is_imported_before_it_is_needed():
    added = loaded("from mn_comm import *") - loaded("import numpy, mpi4py.MPI")
    heavy = {"chainer", "cupy", "nccl", "matplotlib", "scipy", "hashlib", "logging", "random", "concurrent.futures"}
    assert not added & heavy
    assert not {name for name in added if name.partition(".")[0] in heavy}


def test_the_package_alone_loads_nothing():
    assert not {name.partition(".")[0] for name in loaded("import mn_comm")} & {"numpy", "mpi4py"}


def test_mpi_starts_with_the_first_communicator():
    assert "mpi4py.MPI" not in loaded("from mn_comm import *; import mn_comm.building_blocks")
    assert "mpi4py.MPI" in loaded("import mn_comm; mn_comm.create_communicator('naive')")


def test_every_public_name_is_there():
    for module in (mn_comm, building_blocks):
        assert all(hasattr(module, name) for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
    assert set(mn_comm.__all__) == set(mn_comm._HOME_OF)
    assert {"MPI", "Owners", "Ranks", "waiting_for"} <= set(building_blocks.__all__)
    # __all__ is what the module has: no helper that it imports for itself may be among it.
    modules = {name for name in building_blocks.__all__ if isinstance(getattr(building_blocks, name), ModuleType)}
    assert modules == {"MPI"}
    assert not {*building_blocks.__all__} & {*vars(typing), "load_on_demand", "annotations"}


def test_a_user_of_collectives_needs_few_names():
    assert len(mn_comm.__all__) <= 15
    assert not {*mn_comm.__all__} & {*building_blocks.__all__}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'mn_comm' has no attribute 'communicate'"):
        _ = mn_comm.communicate


# The second thread needs MPI while the first one is importing it.
TWO_THREADS = """
import sys, threading, time
from mn_comm.basis.mpi import MPI
is_importing = threading.Event()

def pause(frame, event, argument):
    module = sys.modules.get("mpi4py.MPI")
    if event == "call" and module is not None and not hasattr(module, "COMM_WORLD") and not is_importing.is_set():
        is_importing.set()
        time.sleep(0.5)

def load():
    sys.setprofile(pause)
    MPI.COMM_WORLD
    sys.setprofile(None)

thread = threading.Thread(target=load)
thread.start()
is_importing.wait(10)
print(MPI.COMM_WORLD.size)
thread.join()
"""


def test_two_threads_may_need_mpi_for_the_first_time():
    job = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=30)
    assert job.stdout == "1\n", job.stderr


# Without mn-guard.
A_CHILD_ENDS = """
import os, sys
from mn_comm.basis import guard
{}guard._found.append(guard.Guard())
process = os.getpid()
guard.at_exit(lambda: print("at the end of", "the process" if os.getpid() == process else "a child", flush=True))
if os.fork() == 0:
    sys.exit()
os.wait()
"""


@pytest.mark.parametrize("guard", ["", "# not yet: "])
def test_a_forked_child_does_not_end_for_its_parent(guard):
    code = A_CHILD_ENDS.format(guard)
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (job.stdout, job.stderr) == ("at the end of the process\n", "")
