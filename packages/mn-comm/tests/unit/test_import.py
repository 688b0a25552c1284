"""What importing the package imports: little beyond NumPy and mpi4py."""

import subprocess
import sys

import pytest

import mn_comm

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
    assert "mpi4py.MPI" not in loaded("from mn_comm import *")
    assert "mpi4py.MPI" in loaded("import mn_comm; mn_comm.create_communicator('naive')")


def test_every_public_name_is_there():
    assert all(hasattr(mn_comm, name) for name in mn_comm.__all__)
    # All except a class of MPI, which would start MPI.
    assert {*mn_comm.__all__, "Ranks"} == set(mn_comm._HOME_OF)
    assert set(mn_comm.__all__) <= set(dir(mn_comm))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"module 'mn_comm' has no attribute 'communicate'"):
        _ = mn_comm.communicate
