"""The doctor's checks of MPI libraries and of ``mpiexec``, each broken in turn."""

import os
import sys

import pytest

from mn_tools.doctor import mpi
from mn_tools.doctor.options import Options

OPTIONS = Options(seconds=30)
OTHER = {"MPICH": "Open MPI", "Open MPI": "MPICH"}


@pytest.fixture
def elsewhere(machine, tmp_path, monkeypatch):
    """A folder with a Python but no mpiexec, and a PATH without mpiexec."""
    folder = tmp_path / "environment"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    machine.path_without_commands()
    return folder


def library_checks(options=OPTIONS):
    library, checks = mpi.check_library(options)
    return library, [check.code for check in checks], checks[-1]


def test_the_library_as_it_is(machine):
    library, codes, _ = library_checks()
    assert codes == ["", ""]
    assert library.family in OTHER
    assert os.path.exists(library.file)


@pytest.mark.parametrize(("name", "value"), [("MPI4PY_LIBMPI", "/nowhere/libmpi.so"), ("MPI4PY_MPIABI", "no-such-abi")])
def test_a_setting_that_names_a_library_that_is_not_there(machine, name, value):
    machine.setenv(name, value)
    library, codes, check = library_checks()
    assert (library, codes) == (None, ["mpi-library-setting"])
    assert f"{name}={value}" in check.found
    assert name in check.advice


def test_a_setting_that_names_a_library_whose_name_mpi4py_does_not_know(machine, tmp_path):
    library = tmp_path / "libmpich.so.12"
    library.touch()
    machine.setenv("MPI4PY_LIBMPI", str(library))
    message = "libmpi.so.12: cannot open shared object file: No such file or directory"
    machine.module("mpi4py/__init__", f"raise ImportError({message!r})")
    found, codes, check = library_checks()
    assert (found, codes) == (None, ["mpi-library-name"])
    assert f"ln -s {library} FOLDER/libmpi.so.12" in check.advice


def test_no_library_at_all(machine):
    machine.at_start("import mpi4py._mpiabi\nmpi4py._mpiabi.LIBMPI_PATH[:] = ['/nowhere']", "start_library")
    library, codes, check = library_checks()
    assert (library, codes) == (None, ["mpi-library-missing"])
    assert "cannot load MPI library" in check.found


def test_a_library_that_kills_the_process(machine):
    machine.module("mpi4py/__init__", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    library, codes, check = library_checks()
    assert (library, codes) == (None, ["mpi-library-missing"])
    assert "SIGSEGV" in check.found


def replace_init(machine, statement):
    machine.at_start(
        "import mpi4py\n"
        "mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        f"def init(level):\n    {statement}\n"
        "MPI.Init_thread = init",
        "start_library",
    )


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os.write(2, b'no network\\n'); os._exit(7)", "exit status 7\nno network"),
        ("raise RuntimeError('it would not')", "it would not"),
    ],
)
def test_a_library_that_does_not_start(machine, statement, said):
    replace_init(machine, statement)
    library, codes, check = library_checks()
    assert codes == ["", "mpi-init-fails"]
    assert said in check.found
    assert library is not None


def test_a_library_that_waits_for_ever(machine, tmp_path):
    replace_init(machine, f"import signal; open({str(tmp_path / 'there')!r}, 'w').close(); signal.pause()")
    machine.time_out_at(tmp_path / "there")
    assert library_checks()[1] == ["", "mpi-init-hangs"]


def test_no_mpiexec(elsewhere):
    launcher, check = mpi.find_launcher(OPTIONS)
    assert (launcher, check.code) == (None, "mpiexec-missing")


def test_mpiexec_beside_python_but_not_on_path(machine, elsewhere):
    machine.mpiexec("exit 0", folder=elsewhere)
    launcher, check = mpi.find_launcher(OPTIONS)
    assert check.code == "mpiexec-not-on-path"
    assert launcher.path == str(elsewhere / "mpiexec")
    assert f'export PATH="{elsewhere}:$PATH"' in check.advice


@pytest.mark.parametrize("script", ["echo libprrte.so.3: cannot open >&2; exit 127", "kill -SEGV $$"])
def test_an_mpiexec_that_does_not_run(machine, elsewhere, script):
    machine.command("mpiexec", script)
    launcher, check = mpi.find_launcher(OPTIONS)
    assert (launcher, check.code) == (None, "mpiexec-fails")


def test_an_mpiexec_that_hangs(machine, elsewhere):
    machine.command("mpiexec", "exec /bin/sleep 300")
    launcher, check = mpi.find_launcher(Options(seconds=0.5))
    assert (launcher, check.code) == (None, "mpiexec-fails")
    assert "did not end" in check.found


def test_an_mpiexec_of_nobody(machine, elsewhere):
    machine.command("mpiexec", "echo some batch system 3.1")
    launcher, check = mpi.find_launcher(OPTIONS)
    assert check.code == "mpiexec-unknown"
    assert not list(mpi.check_match(launcher, mpi.Library("MPICH", "5.0", "")))


def test_an_mpiexec_of_another_environment(machine, elsewhere):
    machine.mpiexec("exit 0")
    machine.mpiexec("exit 0", folder=elsewhere)
    launcher, check = mpi.find_launcher(OPTIONS)
    assert check.code == "mpiexec-elsewhere"
    assert str(elsewhere / "mpiexec") in check.found
    assert launcher.path == str(machine.bin / "mpiexec")


@pytest.mark.parametrize("family", ["MPICH", "Open MPI"])
def test_an_mpiexec_of_the_other_mpi(machine, elsewhere, family):
    machine.mpiexec("exit 0", family)
    launcher, check = mpi.find_launcher(OPTIONS)
    assert (check.code, launcher.vendor, launcher.version) == ("", family, "9.8.7")
    (fits,) = mpi.check_match(launcher, mpi.Library(family, "1.2", "libmpi.so"))
    assert fits.code == ""
    (wrong,) = mpi.check_match(launcher, mpi.Library(OTHER[family], "1.2", "/lib/libmpi.so"))
    assert wrong.code == "mpiexec-other-mpi"
    assert f"{launcher.path} is of {family} 9.8.7, but mpi4py runs against {OTHER[family]} 1.2" in wrong.found


@pytest.mark.parametrize(("family", "vendor"), [("Intel MPI", "MPICH"), ("MPICH", "MVAPICH"), ("MPICH", "Intel MPI")])
def test_relatives_of_mpich_start_one_another(machine, elsewhere, family, vendor):
    machine.mpiexec("exit 0", family)
    launcher, _ = mpi.find_launcher(OPTIONS)
    (fits,) = mpi.check_match(launcher, mpi.Library(vendor, "1.2", "libmpi.so"))
    assert fits.code == ""


def test_a_library_that_mpi4py_does_not_know_may_belong_to_any_mpiexec(machine, elsewhere):
    machine.mpiexec("exit 0", "MPICH")
    launcher, _ = mpi.find_launcher(OPTIONS)
    assert list(mpi.check_match(launcher, mpi.Library("unknown", "0.0.0", "libmpi.so"))) == []


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("mpiexec (OpenRTE) 4.1.6", "4.1.6"),
        ("mpirun (Open MPI) 5.0.5rc1", "5.0.5rc1"),
        ("prterun (PRRTE) 3.0.2", "3.0.2"),
    ],
)
def test_the_names_of_open_mpi(machine, elsewhere, said, version):
    machine.command("mpiexec", f"echo '{said}'")
    launcher, _ = mpi.find_launcher(OPTIONS)
    assert (launcher.family, launcher.version) == ("Open MPI", version)


@pytest.mark.parametrize(
    ("vendor", "version", "found"),
    [
        ("Open MPI", "5.0.11", "training can continue without ranks that die"),
        ("Open MPI", "4.1.6", "only Open MPI 5 can continue without it, not Open MPI 4.1.6"),
        ("MPICH", "5.0.2", "a rank that dies ends the job"),
    ],
)
def test_whether_a_job_can_lose_a_rank(vendor, version, found):
    check = mpi.check_survival(mpi.Library(vendor, version, "libmpi.so"))
    assert found in check.found
