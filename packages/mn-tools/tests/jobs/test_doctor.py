"""The doctor, started as a user starts it, on machines with one problem each; it starts ranks by itself."""

import json
import os
import shutil
import subprocess
import sys

import pytest

OTHER = {"MPICH": "Open MPI", "Open MPI": "MPICH"}
MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
IN_RANKS = "doctor.probe"
REPLACE = """
import mpi4py
mpi4py.rc.initialize = False
from mn_tools.doctor import exercises
def broken(world, original=exercises.{step}):
    if world.rank == {rank}:
        {statement}
    return original(world)
exercises.{step} = broken
"""

CHANGE = """
import mpi4py
mpi4py.rc.initialize = False
from mn_tools.doctor import exercises
original = exercises._expect
def changed(array, value, where):
    array.flat[0] += 1
    original(array, value, where)
exercises._expect = changed
"""

# A filter of system calls, like that of a container: process_vm_readv fails with EPERM.
FORBID = """
import ctypes, platform, struct
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
load, equal, give = 0x20, 0x15, 0x06
program = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, head, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""


class Report:
    """The doctor's output: its exit status, its problems by code, and the complete text."""

    def __init__(self, process):
        self.status = process.returncode
        self.text = process.stdout
        assert process.stdout.startswith("{"), process.stdout + process.stderr
        self.whole = json.loads(process.stdout)
        self.checks = self.whole["checks"]
        # The contents of /dev/shm on the machine that runs the tests do not matter.
        self.problems = {check["code"]: check for check in self.checks if check["code"]}
        self.codes = {code for code in self.problems if not code.startswith("shm-")}


def run(*arguments):
    command = [sys.executable, "-m", "mn_comm", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=70)


def examine(*arguments):
    report = Report(run("--json", "--timeout=30", *arguments))
    failed = any(check["status"] == "failure" for check in report.checks)
    assert report.status == int(failed), report.text
    return report


def family():
    return "Open MPI" if "Open MPI" in subprocess.check_output([MPIEXEC, "--version"], text=True) else "MPICH"


def break_exercise(machine, step, statement, rank=1):
    machine.at_start(REPLACE.format(step=step, statement=statement, rank=rank), IN_RANKS)


def test_a_machine_on_which_all_is_well(machine):
    report = examine()
    assert report.codes == set()
    found = {check["name"]: check["found"] for check in report.checks if check["group"] == "Ranks"}
    assert list(found) == ["start", "direct copies", "point-to-point", "reduction", "shared memory", "end"]
    assert found["start"].startswith("2 ranks on ")
    assert found["reduction"] == "1,000,000 numbers added up over 2 ranks"


@pytest.fixture
def no_direct_copies(machine):
    """Forbid that ranks read one another's memory, where a filter can be installed."""
    if subprocess.run([sys.executable, "-c", FORBID], capture_output=True).returncode:
        pytest.skip("this system allows no filters of system calls")
    machine.at_start(FORBID, IN_RANKS)


def test_forbidden_copies_between_ranks(machine, no_direct_copies):
    report = examine()
    if family() == "Open MPI":
        assert report.codes == set()
        assert "MPI does without: rank 0: process_vm_readv failed (errno 1" in report.text
        return
    assert report.codes == {"direct-copies-forbidden"}
    check = report.problems["direct-copies-forbidden"]
    assert "process_vm_readv failed (errno 1" in check["found"]
    assert "MPIR_CVAR_CH4_CMA_ENABLE=0" in check["advice"]


def test_forbidden_copies_that_mpi_does_without(machine, no_direct_copies):
    machine.setenv("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    report = examine()
    assert report.codes == set()
    assert "MPI does without" in report.text


def test_as_many_ranks_as_asked_for(machine):
    report = examine("--ranks", "3")
    assert report.codes == set()
    assert report.whole["ranks"] == 3
    assert "3 ranks" in report.text


def test_lines_for_people(machine):
    machine.setenv("COLUMNS", "80")
    process = run()
    assert process.returncode == 0, process.stdout
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert lines[0].startswith("mn_comm doctor on ")
    assert "Ranks" in lines
    assert lines[-1].endswith("0 failures")
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)


def test_no_mpi4py(machine):
    machine.without_module("mpi4py")
    report = examine()
    assert report.codes == {"package-missing"}
    assert report.problems["package-missing"]["name"] == "mpi4py"


def test_no_numpy(machine):
    machine.without_module("numpy")
    report = examine()
    assert report.codes == {"package-missing"}
    assert report.problems["package-missing"]["name"] == "numpy"


def test_an_mpi_library_that_is_not_there(machine):
    machine.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    report = examine()
    assert report.codes == {"mpi-library-setting"}
    assert not [check for check in report.checks if check["group"] == "Ranks"]


def test_no_mpiexec(machine):
    machine.at_start(f"sys.executable = {str(machine.bin / 'python')!r}", "mn_comm")
    os.symlink(sys.executable, machine.bin / "python")
    machine.path_without_commands()
    assert "mpiexec-missing" in examine().codes


def test_mpiexec_of_the_other_mpi_first_on_path(machine):
    machine.plain_mpiexec(OTHER[family()])
    report = examine()
    assert {"mpiexec-other-mpi", "rank-0-of-1"} <= report.codes
    assert "2 processes started, and each believes that it is rank 0 of 1" in report.problems["rank-0-of-1"]["found"]
    assert str(machine.bin / "mpiexec") in report.problems["mpiexec-other-mpi"]["found"]
    assert os.path.dirname(sys.executable) in report.problems["mpiexec-other-mpi"]["advice"]


def test_an_mpiexec_of_nobody_that_tells_ranks_nothing(machine):
    machine.command("mpiexec", '[ "$1" = --version ] && exit\nn=$2; shift 2\nfor i in $(seq $n); do "$@" & done; wait')
    assert examine().codes == {"mpiexec-unknown", "rank-0-of-1"}


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("echo 'cannot open /etc/something' >&2; exit 3", "launch-fails"),
        ("echo 'prterun has detected an attempt to run as root.' >&2; exit 1", "launch-refuses-root"),
        ("echo 'There are not enough slots available in the system' >&2; exit 1", "launch-no-slots"),
        (": >'{there}'; exec sleep 300", "launch-hangs"),
    ],
)
def test_an_mpiexec_that_starts_nothing(machine, tmp_path, script, code):
    there = tmp_path / "there"
    machine.mpiexec(script.format(there=there), family())
    machine.time_out_at(there)
    report = examine()
    assert code in report.codes
    assert not [check for check in report.checks if check["name"] == "reduction"]


def test_an_mpiexec_that_starts_too_few(machine):
    machine.mpiexec(f'shift 2; exec {MPIEXEC} -n 1 "$@"', family())
    report = examine()
    assert "ranks-differ" in report.codes
    assert "got rank 0 of 1" in report.problems["ranks-differ"]["found"]


def test_ranks_that_find_another_environment(machine):
    machine.mpiexec(f'MPI4PY_LIBMPI=/nowhere/libmpi.so; export MPI4PY_LIBMPI; exec {MPIEXEC} "$@"', family())
    report = examine()
    assert "rank-init-fails" in report.codes
    assert "/nowhere/libmpi.so" in report.problems["rank-init-fails"]["found"]


def test_a_rank_that_waits_for_ever(machine, tmp_path):
    there = [tmp_path / "0", tmp_path / "1"]
    come = f"open({str(tmp_path)!r} + f'/{{world.rank}}', 'w').close()"
    break_exercise(machine, "reduction", f"import signal; {come}; world.rank == 1 and signal.pause()", "world.rank")
    machine.time_out_at(*there)
    report = examine()
    assert report.codes == {"exercise-hangs"}
    problem = report.problems["exercise-hangs"]
    assert problem["name"] == "reduction"
    assert "1 did not finish" in problem["found"]


def test_a_rank_that_crashes(machine):
    break_exercise(machine, "reduction", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    report = examine()
    assert report.codes == {"rank-dies"}
    assert report.problems["rank-dies"]["name"] == "reduction"


def test_a_rank_that_crashes_while_another_is_late(machine):
    break_exercise(machine, "reduction", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    late = "import time; result = original(world); time.sleep(0.5); return result"
    break_exercise(machine, "point_to_point", late, rank=0)
    report = examine()
    assert report.codes == {"rank-dies"}
    assert report.problems["rank-dies"]["name"] == "reduction"


def test_numbers_that_arrive_changed(machine):
    machine.at_start(CHANGE, IN_RANKS)
    report = examine()
    assert report.codes == {"exercise-fails"}
    assert "got 1 other values" in report.problems["exercise-fails"]["found"]


def test_a_system_without_shared_memory(machine):
    machine.at_start("import os\ndel os.memfd_create", IN_RANKS)
    report = examine()
    assert report.codes == {"shared-memory-missing"}
    assert report.status == 0


@pytest.mark.parametrize(("value", "code"), [("banana", "cuda-aware-setting"), ("1", "cuda-aware-claimed")])
def test_a_setting_about_devices(machine, value, code):
    machine.setenv("MN_COMM_CUDA_AWARE_MPI", value)
    assert examine().codes == {code}


CUPY = """
import types
__version__ = "14.0.1"
ndarray = type("ndarray", (), {})
class Device:
    def __init__(self, number=0):
        self.pci_bus_id = f"0000:0{number}:00.0"
runtime = types.SimpleNamespace(
    runtimeGetVersion=lambda: 12090,
    driverGetVersion=lambda: 13000,
    getDeviceCount=lambda: 1,
    getDeviceProperties=lambda number: {"name": b"H200", "major": 9, "minor": 0},
)
cuda = types.SimpleNamespace(runtime=runtime, Device=Device)
"""


def test_two_ranks_on_one_gpu(machine):
    machine.module("cupy/__init__", CUPY)
    machine.without_module("nccl")
    report = examine()
    assert report.codes == {"gpu-shared", "nccl-missing"}
    assert "ranks 0, 1 would share 0000:00:00.0" in report.problems["gpu-shared"]["found"]


MOUNT = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$0" "$@"'


def test_a_tiny_dev_shm(machine):
    if subprocess.run(["unshare", "-m", "sh", "-c", MOUNT, "true"], capture_output=True).returncode:
        pytest.skip("no mounts may be made here")
    command = ["unshare", "-m", "sh", "-c", MOUNT, sys.executable, "-m", "mn_comm", "doctor", "--json"]
    report = Report(subprocess.run(command, capture_output=True, text=True, timeout=70))
    assert "shm-full" in report.problems
    assert "2 MiB" in report.problems["shm-full"]["found"]


SSH = 'while [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"'


def test_hosts_that_have_another_numpy(machine):
    machine.distribution("numpy", "1.26.4", machine.site / "there")
    machine.command("ssh", SSH.replace("exec", f"PYTHONPATH={machine.site / 'there'} exec"))
    report = examine("--hosts", "203.0.113.1,no-such-host.invalid")
    assert {"host-package-differs", "host-unresolved"} <= report.codes
    assert report.whole["hosts"] == ["203.0.113.1", "no-such-host.invalid"]
    assert not [check for check in report.checks if check["group"] == "Ranks across hosts"]


def test_ranks_on_hosts_that_are_one(machine):
    # Options that mpiexec passes to ssh, and those of the doctor.
    machine.command("ssh", SSH.replace("do shift", 'do case "$1" in -o | -p | -l) shift ;; esac; shift'))
    report = examine("--hosts", "127.0.0.1,203.0.113.1")
    start, *others = [check for check in report.checks if check["group"] == "Ranks across hosts"]
    assert start["code"] == "hosts-look-alike"
    assert {check["code"] for check in others} == {None}
    assert not report.codes - {"hosts-look-alike", "own-name-loopback"}
