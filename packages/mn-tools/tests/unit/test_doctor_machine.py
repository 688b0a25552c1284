"""The doctor's checks of Python, packages, memory and network, each broken in turn."""

import collections
import mmap
import os
import select
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from mn_tools.doctor import commands, memory, network, software
from mn_tools.doctor.options import Options

OPTIONS = Options(seconds=30)
Room = collections.namedtuple("Room", "total used free")
MEBI = 1 << 20


def codes(checks):
    return [check.code for check in checks]


def test_python_that_is_too_old():
    assert software.check_python((3, 9)).code == "python-old"
    assert "3.9" in software.check_python((3, 9)).found
    assert software.check_python((3, 10)).code == ""


def test_numpy_and_mpi4py_as_they_are(machine):
    assert codes(software.check(OPTIONS)) == ["", "", ""]


def test_a_package_that_is_missing(machine):
    machine.without_module("mpi4py")
    check = software.check_package("mpi4py", (4, 1), 30)
    assert check.code == "package-missing"
    assert f"{sys.executable} -m pip install 'mpi4py>=4.1'" in check.advice


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libwhatever.so.3: cannot open')", "libwhatever.so.3"),
        ("import missing_dependency", "missing_dependency"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_package_that_is_broken(machine, text, said):
    machine.module("numpy/__init__", text)
    check = software.check_package("numpy", (1, 26), 30)
    assert check.code == "package-broken"
    assert said in check.found


def test_a_package_that_is_too_old(machine):
    machine.module("numpy/__init__", "__version__ = '1.25.2'")
    check = software.check_package("numpy", (1, 26), 30)
    assert check.code == "package-old"
    assert "1.25.2" in check.found


def test_a_program_that_hangs_is_ended_with_all_it_started(machine, tmp_path):
    hanging = machine.command("hanging", f'trap "" TERM\nsleep 300 & echo "$!"\n: >{tmp_path / "there"}\nwait\nwait')
    machine.time_out_at(tmp_path / "there")
    outcome = commands.run([hanging], 30)
    assert outcome.timed_out
    try:
        descriptor = os.pidfd_open(int(outcome.out))
    except ProcessLookupError:
        return
    # It has been sent SIGKILL, but may not have ended yet.
    assert select.select([descriptor], [], [], 30)[0]
    os.close(descriptor)


class Unkillable(subprocess.Popen):
    """A process that waits for a broken device: neither SIGTERM nor SIGKILL ends it."""

    def wait(self, timeout=None):
        assert timeout is not None, "waits for ever"
        super().wait()  # so that none is left
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_a_program_that_cannot_be_killed(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    outcome = commands.run(["true"], 30)
    assert outcome.timed_out


@pytest.mark.parametrize(("number", "said"), [(9, "signal SIGKILL"), (40, "signal 40")])
def test_how_a_program_has_ended(number, said):
    assert commands.run(["sh", "-c", f"kill -{number} $$"], 30).ending == said


def test_what_is_written_between_other_things_is_found():
    out = 'noise[1]mn-doctor:{"a": 1}\nmn-doctor:{"b": 2}mn-doctor:{"c": {"d": 3}} rest\nmn-doctor:[4]\nmn-doctor:{"e"'
    assert commands.Outcome(0, out, "").records() == [{"a": 1}, {"b": 2}, {"c": {"d": 3}}]


def test_dev_shm_that_is_missing(tmp_path):
    assert codes(memory.check(OPTIONS, tmp_path / "shm")) == ["shm-missing"]


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (64 * MEBI, 60 * MEBI, "shm-small"),
        (1024 * MEBI, 1000 * MEBI, ""),
        (1024 * MEBI, 15 * MEBI, "shm-full"),
        (8 * MEBI, 8 * MEBI, "shm-full"),
    ],
)
def test_dev_shm_of_some_size(tmp_path, total, free, expected):
    assert codes(memory.check(OPTIONS, tmp_path, lambda folder: Room(total, total - free, free))) == [expected]


def test_files_that_aborted_jobs_have_left(tmp_path):
    for number in range(6):
        path = tmp_path / f"mpich_shm_{number}"
        path.write_bytes(bytes(2 * MEBI))
        if number != 5:  # which a job may have just created
            os.utime(path, (0, 0))
    os.symlink("/nowhere", tmp_path / "mpich_shm_gone")
    (tmp_path / "of_another_program").write_bytes(bytes(2 * MEBI))
    with open(tmp_path / "mpich_shm_1", "r+b") as used:
        mapped = mmap.mmap(used.fileno(), 0)
    (left,) = memory.check_leftovers(OPTIONS, tmp_path, tmp_path)
    assert left.code == "shm-leftovers"
    files = "4 files of jobs that have ended, 8 MiB: mpich_shm_0, mpich_shm_2, mpich_shm_3 and 1 more"
    assert left.found == files
    (left,) = memory.check_leftovers(replace(OPTIONS, fix=True), tmp_path, tmp_path)
    mapped.close()
    assert (left.code, left.found) == ("", f"removed {files}")
    remaining = sorted(path.name for path in tmp_path.iterdir())
    assert remaining == ["mpich_shm_1", "mpich_shm_5", "mpich_shm_gone", "of_another_program"]


def test_another_program_has_a_file_in_its_memory_whose_name_is_no_text(tmp_path):
    shared = tmp_path / "mpich_shm_0"
    shared.write_bytes(bytes(MEBI))
    os.utime(shared, (0, 0))
    other = os.fsencode(tmp_path) + b"/\xff"
    os.link(shared, other)
    with open(other, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert codes(memory.check_leftovers(OPTIONS, tmp_path, tmp_path)) == ["shm-leftovers"]


def test_session_folders_of_jobs_that_were_killed(tmp_path):
    host = socket.gethostname().partition(".")[0]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running, elsewhere, new = os.getpid(), ended.pid + 1, ended.pid + 2
    for number, where, seconds in (
        (ended.pid, host, 0),
        (running, host, 0),
        (elsewhere, "other", 0),
        (new, host, None),
    ):
        folder = tmp_path / f"ompi.{number}"
        (folder / "0").mkdir(parents=True)
        (folder / f"pmix.{where}.tool.{number}").touch()
        if seconds is not None:
            os.utime(folder, (seconds, seconds))
    (tmp_path / "ompi.txt").touch()
    (left,) = memory.check_leftovers(OPTIONS, tmp_path, tmp_path)
    folders = f"1 session folders of Open MPI jobs that have ended: ompi.{ended.pid}"
    assert (left.code, left.found) == ("session-leftovers", folders)
    (left,) = memory.check_leftovers(replace(OPTIONS, fix=True), tmp_path, tmp_path)
    assert (left.code, left.found) == ("", f"removed {folders}")
    assert len(list(tmp_path.iterdir())) == 4
    assert not list(memory.check_leftovers(OPTIONS, tmp_path, tmp_path))


@pytest.fixture
def cards(tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_1").mkdir()
    return tmp_path


def look(folder, environ=(), status=network.DISABLED, limit=-1):
    return list(network.check(OPTIONS, folder, dict(environ), lambda: status, lambda: limit))


def test_no_infiniband(tmp_path):
    assert codes(look(tmp_path / "infiniband")) == [""]


def test_infiniband_where_a_fork_is_not_safe(cards):
    (check,) = look(cards)
    assert check.code == "infiniband-fork"
    assert "mlx5_0, mlx5_1" in check.found
    assert "forkserver" in check.advice


@pytest.mark.parametrize("variable", ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE"])
def test_infiniband_where_a_variable_makes_forks_safe(cards, variable):
    (check,) = look(cards, {variable: "1"})
    assert (check.code, variable in check.found) == ("", True)


@pytest.mark.parametrize("status", [network.ENABLED, network.UNNEEDED])
def test_infiniband_where_the_library_or_the_kernel_makes_forks_safe(cards, status):
    assert codes(look(cards, status=status)) == [""]


def test_infiniband_with_little_memory_that_may_be_locked(cards):
    assert codes(look(cards, status=network.UNNEEDED, limit=65536)) == ["", "infiniband-memlock"]
    assert codes(look(cards, status=network.UNNEEDED, limit=1 << 40)) == [""]


def test_without_libibverbs_forks_do_not_count_as_safe(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(network.ctypes, "CDLL", missing)
    assert network.fork_status() == network.DISABLED
