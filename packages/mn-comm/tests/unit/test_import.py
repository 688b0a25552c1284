"""What importing the package brings along: little beyond NumPy and mpi4py."""

import subprocess
import sys

import mn_comm

LOADED = "import sys; print(*sys.modules)"


def loaded(code):
    job = subprocess.run([sys.executable, "-c", f"{code}; {LOADED}"], capture_output=True, text=True, check=True)
    return set(job.stdout.split())


def test_nothing_heavy_is_imported_before_it_is_needed():
    added = loaded("import mn_comm") - loaded("import numpy, mpi4py.MPI")
    heavy = {"chainer", "cupy", "nccl", "matplotlib", "scipy", "hashlib", "logging", "random", "concurrent.futures"}
    assert not added & heavy
    assert not {name for name in added if name.partition(".")[0] in heavy}


def test_every_public_name_is_there():
    assert all(hasattr(mn_comm, name) for name in mn_comm.__all__)
