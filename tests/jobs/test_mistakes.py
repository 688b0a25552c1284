"""Mistakes on one of three ranks: the job ends by itself, or prints a message, and its last lines name the culprit."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TRAINING = Path(__file__).with_name("mistaken_training.py")
MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
LAST_LINES = 15
LIMIT = 40  # seconds; on an idle machine each takes two or three
STALL = "3"

ENDS = {
    "exception before training": ["ValueError: expected --batch-size of at least 1, got 0", "rank 1"],
    "exception in the loss": ["ValueError: expected a positive margin, got -1", "rank 1"],
    "exception in an extension": ["ValueError: expected a picture of the losses, got none", "rank 1"],
    "exit with a text": ["the learning rate must be positive", "rank 1"],
    "exit with a status": ["exit status 3", "rank 1"],
    "missing module": ["ModuleNotFoundError: No module named 'albumentations_of_rank_1'", "rank 1"],
    "missing file": ["FileNotFoundError: .*'pictures-of-rank-1.npz'", "rank 1"],
    "dead worker": ["worker process [0-9]+ of the iterator was killed by SIGKILL", "rank 1"],
    "full disk": [r"rank 1 cannot write result/run\.1\.8: .*File too large"],
    "wrong shape": [r"rank 1 differs from rank 0, first at /l/W: shape \(2, 4\).*shape \(3, 4\)"],
    "wrong dtype": [r"rank 1 differs from rank 0, first at /l/W: .* float32 on rank 0, .* float64 on rank 1"],
    "another model": ["rank 1 differs from rank 0, first at /extra/W: missing on rank 0"],
    "fewer iterations": ["rank 1 has reached the end of its program"],
    "_exit": [r"\[chainermn\] rank 1 of 3 .* (ended with status 5|died of a signal, or called os._exit)"],
    "SIGKILL": [r"\[chainermn\] rank 1 of 3 .* (was killed by SIGKILL|died of a signal, or called os._exit)"],
    "SIGTERM": [r"\[chainermn\] rank 1 of 3 .* was ended by SIGTERM, at .*mistaken_training.py:[0-9]+ in end_by"],
    "SIGSEGV": [r"\[chainermn\] rank 1 of 3 .* \(Segmentation fault\), at .*mistaken_training.py:[0-9]+ in read_"],
}
SPEAKS = {
    "missing batch": [
        r"rank 1 of 3 \(.+\).* has waited for [0-9.]+ s in recv_obj\(source=2.*training.py:[0-9]+ in forward",
        r"rank 2 of 3 \(.+\).* has waited for [0-9.]+ s in multi_node_mean_grad",
    ],
    "SIGSTOP": ["rank 1 does not answer", r"rank 2 of 3 \(.+\).* has waited for [0-9.]+ s in multi_node_mean_grad"],
}


class Job:
    """A training on three ranks, and what it has written."""

    def __init__(self, mistake, folder, environ):
        self.output = []
        self.process = subprocess.Popen(
            [MPIEXEC, "-n", "3", sys.executable, TRAINING, mistake],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CHAINERMN_STALL_SECONDS": STALL,
                "PYTHONUNBUFFERED": "1",
                **environ,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as a terminal does
        )
        self.watchdog = threading.Timer(LIMIT, self.kill)
        self.watchdog.start()

    def read_until(self, *patterns):
        """Read lines until each of the patterns was in one, or there are no more; return the last of them."""
        missing = set(patterns)
        for line in self.process.stdout:
            self.output.append(line)
            missing -= {pattern for pattern in missing if re.search(pattern, line)}
            if patterns and not missing:
                break
        return "".join(self.output[-LAST_LINES:])

    def kill(self):
        ranks = re.findall(r"process ([0-9]+) is rank", "".join(self.output))
        for kill, process in [(os.killpg, self.process.pid), *((os.kill, int(rank)) for rank in ranks)]:
            try:
                kill(process, signal.SIGKILL)
            except ProcessLookupError:  # it has ended
                pass


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(mistake, **environ):
        jobs.append(Job(mistake, tmp_path, environ))
        return jobs[-1]

    yield start
    for job in jobs:
        job.watchdog.cancel()
        job.kill()
        job.process.communicate()


def is_open_mpi():
    return "Open MPI" in subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout


def ended_by_itself(job):
    is_late = not job.watchdog.is_alive()
    return not is_late and job.process.wait() is not None


@pytest.mark.parametrize("mistake", ENDS)
def test_the_job_ends_and_names_the_culprit(mistake, start):
    job = start(mistake)
    last = job.read_until()
    assert ended_by_itself(job), last
    assert (job.process.returncode == 0) == (mistake == "full disk")  # that rank continues without the checkpoint
    for pattern in ENDS[mistake]:
        assert re.search(pattern, last), last


@pytest.mark.parametrize("mistake", SPEAKS)
def test_a_job_that_may_go_on_says_what_it_waits_for(mistake, start):
    job = start(mistake)
    last = job.read_until(*SPEAKS[mistake])
    assert job.process.poll() is None
    for pattern in SPEAKS[mistake]:
        assert re.search(pattern, last), last
    # On a busy machine, ranks may also have waited for one another at the start.
    assert len(re.findall(r"^\[chainermn\] (?!.*MPI_Init)", last, re.MULTILINE)) <= 8


def test_ctrl_c(start):
    job = start("Ctrl-C", CHAINERMN_PATIENCE="2")
    job.read_until("press")
    os.killpg(job.process.pid, signal.SIGINT)
    last = job.read_until()
    assert ended_by_itself(job), last
    assert job.process.returncode
    if not is_open_mpi():  # its launcher ends the ranks itself, and does not read their further output
        assert "chainermn: interrupted on rank 0" in last


# Variables that the other library's launcher sets for the processes that it starts.
OTHERS = {
    "MPICH": {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "{rank}"},
    "Open MPI": {"PMI_SIZE": "3", "PMI_RANK": "{rank}"},
}


def test_the_launcher_of_the_other_library(tmp_path):
    told = OTHERS["Open MPI" if is_open_mpi() else "MPICH"]
    jobs = []
    for rank in range(3):
        environ = {**os.environ, **{name: value.format(rank=rank) for name, value in told.items()}}
        command = [sys.executable, TRAINING, "none"]
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True))
    for job in jobs:
        _, errors = job.communicate(timeout=LIMIT)
        last = "".join(errors.splitlines(keepends=True)[-LAST_LINES:])
        assert job.returncode == 1
        assert re.search("expected 3 processes in MPI_COMM_WORLD, .* different implementations", last), last
