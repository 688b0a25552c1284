"""Where the timeline is written, however the job ends."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"

START = """
import atexit, os, signal, sys
from mn_comm import create_communicator, span
from mn_comm.building_blocks import is_recording
from mn_tools.timeline import collect, start
collect._PATIENCE_SECONDS = collect._CLOCK_SECONDS = 1e9  # a rank is not missing because the machine is busy
comm = create_communicator("flat")
with span("mine"):
    comm.allreduce_obj(1)
"""
PLAIN = START + "comm.finalize()\n"
# For three ranks, one of which never comes: rank 0 stops waiting only after it has the part of the other one.
MISSING = """
def be_impatient():
    collect._PATIENCE_SECONDS = 1.0
def receive_then_be_impatient(status, receive=start._collector._receive):
    part = receive(status)
    be_impatient()
    return part
missing = int(sys.argv[1])
if missing == 0:
    be_impatient()
elif comm.rank == 0:
    start._collector._receive = receive_then_be_impatient
"""
# A rank that is alive but never ends, while the others end, until just before MPI is finalised.
LATE = (
    START
    + MISSING
    + """
if comm.rank == missing:
    start._collector._pid = None  # as if it were not its end
    for rank in range(3):
        if rank != missing:
            comm.mpi_comm.recv(source=rank)
else:
    atexit._run_exitfuncs()
    print("survived", flush=True)
    comm.mpi_comm.send(None, missing)
"""
)
# A rank that dies, after the others have done what they need it for. They end without MPI_Finalize, which sometimes
# waits for the dead rank (Open MPI 5.0.11): what is registered first is called last.
KILLED = (
    "import atexit, os\natexit.register(os._exit, 0)\n"
    + START
    + MISSING
    + """
if comm.rank == missing:
    for rank in range(3):
        if rank != missing:
            comm.mpi_comm.recv(source=rank)
    os.kill(os.getpid(), signal.SIGKILL)
comm.mpi_comm.send(None, missing)
print("survived", flush=True)
"""
)
# What Python does at the end of a program that was ended by an exception, except for MPI_Finalize, which would wait.
FAILED = (
    START
    + """
if comm.rank == 1:
    sys.last_type = ValueError
    atexit._run_exitfuncs()
    comm.mpi_comm.send(None, 0)
else:
    comm.mpi_comm.recv(source=1)
    collect._PATIENCE_SECONDS = 1.0  # rank 1 sends nothing, and has written its part already
"""
)
# The task ends after the script, and before other steps of the exit sequence.
TASK_AT_THE_END = (
    START
    + """
import threading
from mn_comm.building_blocks import Worker, at_exit
is_ending = threading.Event()
def task():
    with span("last task"):
        is_ending.wait()
worker = Worker()
worker.put(task)
at_exit(is_ending.set)
"""
)
# Rank 1 writes its part after rank 0 has looked for parts, and before it has written the trace.
LATE_PART = (
    START
    + """
write = collect.trace.write
def write_later(*args):
    comm.mpi_comm.send(None, 1)
    comm.mpi_comm.recv(source=1)
    write(*args)
collect.trace.write = write_later
start._collector.is_aligned = False
if comm.rank == 1:
    comm.mpi_comm.recv(source=0)
    start._collector.finish()
    comm.mpi_comm.send(None, 0)
    start._collector._pid = None
"""
)
EXCEPTION = (
    START
    + """
if sys.argv[1] == "all" or comm.rank == 1:
    raise RuntimeError("known")
comm.recv_obj(1)
"""
)
EXIT_STATUS = (
    START
    + """
if comm.rank == 1:
    sys.exit(3)
comm.recv_obj(1)
"""
)
FORKED = (
    START
    + """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there is another thread
child = os.fork()
if child == 0:
    assert not is_recording()
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
)
PARTS = """
from mpi4py import MPI
from mn_comm import create_communicator, span
comm = create_communicator("flat", MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, 0))
with span("mine"):
    comm.allreduce_obj(1)
if MPI.COMM_WORLD.rank == 0:
    for rank in (1, 2):
        MPI.COMM_WORLD.recv(source=rank)
else:
    import atexit
    atexit._run_exitfuncs()
    MPI.COMM_WORLD.send(None, 0)
"""


def survives():
    """Return whether the launcher can keep the other ranks alive when one is killed."""
    return "Open MPI" in subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False).stdout


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script, and returns the job and the trace, or ``None`` if there is none."""

    def run(script, *args, ranks=3, file=tmp_path / "t.json", options=(), **environ):
        argv = [MPIEXEC, *options, "-n", str(ranks), sys.executable, "-c", script, *args]
        environ = {**os.environ, "CHAINERMN_TIMELINE": str(file), **environ}
        job = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
        return job, json.loads(file.read_text()) if os.path.isfile(file) else None

    return run


def ranks_of(trace):
    return sorted({event["pid"] for event in trace["traceEvents"] if event["name"] == "mine"})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_file_for_all(run, tmp_path, ranks):
    job, trace = run(PLAIN, ranks=ranks)
    assert (job.returncode, job.stderr) == (0, "")
    assert ranks_of(trace) == trace["otherData"]["ranks"] == list(range(ranks))
    assert sorted(trace["otherData"]["clock_error_us"]) == [str(rank) for rank in range(ranks)]
    assert trace["otherData"]["notes"] == trace["otherData"]["placed_by_wall_clock"] == []
    assert os.listdir(tmp_path) == ["t.json"]


@pytest.mark.parametrize(("script", "left"), [(PLAIN, ["t.json"]), (EXCEPTION, [])])
def test_nothing_of_an_earlier_job_is_left(run, tmp_path, script, left):
    for rank in range(4):
        (tmp_path / f"t.json.rank{rank}.part").touch()
    (tmp_path / "t.json").write_text("earlier")
    (tmp_path / "t.json.other").touch()
    run(script, "all", ranks=2)
    assert sorted(os.listdir(tmp_path)) == [*left, "t.json.other"]


def test_without_the_variable_there_is_no_file(run, tmp_path):
    job, trace = run(PLAIN + "assert not is_recording()\n", CHAINERMN_TIMELINE="")
    assert (job.returncode, job.stderr, trace) == (0, "", None)
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written(run, tmp_path):
    job, _ = run(PLAIN, file=tmp_path / "no" / "t.json")
    assert job.returncode == 0
    assert job.stderr.count("no timeline is recorded") == 1


def test_a_folder_that_is_gone_at_the_end(run, tmp_path):
    (tmp_path / "folder").mkdir()
    gone = PLAIN + "comm = create_communicator('flat')\nif comm.rank == 0: os.rmdir(sys.argv[1])\ncomm.finalize()\n"
    job, _ = run(gone, str(tmp_path / "folder"), file=tmp_path / "folder" / "t.json")
    assert job.returncode == 0
    assert job.stderr.count("could not be written") == 1


def test_a_rank_that_never_comes_is_not_waited_for(run, tmp_path):
    job, trace = run(LATE, "1")
    assert (job.returncode, job.stdout.count("survived")) == (0, 2), job.stderr
    assert ranks_of(trace) == [0, 2]
    assert trace["otherData"]["notes"] == ["missing: rank 1"]
    assert "lacks some ranks; missing: rank 1" in job.stderr


def test_without_rank_0_there_are_parts(run, tmp_path):
    job, trace = run(LATE, "0")
    assert (job.returncode, job.stdout.count("survived"), trace) == (0, 2, None), job.stderr
    assert sorted(os.listdir(tmp_path)) == ["t.json.rank1.part", "t.json.rank2.part"]
    subprocess.run([sys.executable, "-m", "mn_comm", "timeline", str(tmp_path / "t.json")], check=True, timeout=30)
    trace = json.loads((tmp_path / "t.json").read_text())
    assert ranks_of(trace) == [1, 2]
    assert trace["otherData"]["placed_by_wall_clock"] == []  # they had been compared at the beginning
    assert os.listdir(tmp_path) == ["t.json"]


@pytest.mark.skipif(not survives(), reason="this mpiexec ends the other ranks")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(run, tmp_path, rank):
    job, trace = run(KILLED, str(rank), options=["--with-ft", "ulfm"])
    assert job.stdout.count("survived") == 2, job.stderr
    if rank:
        assert ranks_of(trace) == [0, 2]
    else:
        assert sorted(os.listdir(tmp_path)) == ["t.json.rank1.part", "t.json.rank2.part"]


def test_a_rank_that_has_failed_does_not_wait(run, tmp_path):
    job, trace = run(FAILED, ranks=2)
    assert (job.returncode, job.stderr) == (0, "")
    assert ranks_of(trace) == [0, 1]
    assert os.listdir(tmp_path) == ["t.json"]


def test_tasks_of_background_threads_are_waited_for(run):
    job, trace = run(TASK_AT_THE_END, ranks=2)
    assert (job.returncode, job.stderr) == (0, "")
    assert [event["pid"] for event in trace["traceEvents"] if event["name"] == "last task"] == [0, 1]


def test_an_exit_status_ends_all_ranks_without_waiting(run, tmp_path):
    job, trace = run(EXIT_STATUS, ranks=2)
    assert "exit status 3 on rank 1" in job.stderr
    assert (trace, os.listdir(tmp_path)) == (None, [])


def test_a_part_that_comes_too_late_stays(tmp_path, run):
    job, trace = run(LATE_PART, ranks=2)
    assert job.returncode == 0, job.stderr
    assert trace["otherData"]["notes"] == ["missing: rank 1"]
    assert sorted(os.listdir(tmp_path)) == ["t.json", "t.json.rank1.part"]


@pytest.mark.parametrize("which", ["one", "all"])
def test_an_exception_leaves_nothing(tmp_path, run, which):
    job, trace = run(EXCEPTION, which)
    assert "RuntimeError: known" in job.stderr
    assert (trace, os.listdir(tmp_path)) == (None, [])


def test_parts_of_ranks_with_no_communicator_in_common(run, tmp_path):
    job, trace = run(PARTS)
    assert (job.returncode, job.stderr) == (0, "")
    assert ranks_of(trace) == [0, 1, 2]
    assert trace["otherData"]["placed_by_wall_clock"] == [0, 1, 2]
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_forked_process_has_no_part(run, tmp_path):
    job, trace = run(FORKED, ranks=2)
    assert job.returncode == 0, job.stderr
    warned = re.findall(r", a child of rank (\d) of 2, has reached the end of the program", job.stderr)
    assert (sorted(warned), job.stderr.count("\n")) == (["0", "1"], 2)
    assert ranks_of(trace) == [0, 1]
