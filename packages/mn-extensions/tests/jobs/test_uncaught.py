"""Uncaught exceptions on one rank of several, with the hook and without."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

PREAMBLE = """
import os, sys, threading, time
import mn_extensions
from mn_extensions import global_except_hook
global_except_hook.add_hook()
from mpi4py import MPI
comm = MPI.COMM_WORLD
def boom(*args):
    if comm.rank == 1:
        print("raising at", time.time(), file=sys.stderr, flush=True)
        raise ValueError("boom " + "!")
"""

TRAINING = """
import multiprocessing
import chainer, numpy as np
from mn_comm import create_communicator
communicator = create_communicator("naive")
class Model(chainer.Chain):
    def __init__(self):
        super().__init__(l=chainer.links.Linear(2, 1))
    def forward(self, x):
        if where == "forward" and updater.iteration == 3:
            boom()
        return chainer.functions.sum(self.l(x))
class Optimizer(chainer.optimizers.SGD):
    def update(self, lossfun=None, *args, **kwds):
        self.target.cleargrads()
        lossfun(*args, **kwds).backward()
        communicator.multi_node_mean_grad(self.target)
        super().update()
class Data(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 100
    def get_example(self, i):
        # Chainer reads the first batch of all in the script's own process.
        if i > 20 and (where == "thread" or (where == "worker" and multiprocessing.parent_process())):
            boom()
        return np.ones(2, "f4")
kind = {
    "thread": chainer.iterators.MultithreadIterator,
    "worker": chainer.iterators.MultiprocessIterator,
}.get(where, chainer.iterators.SerialIterator)
iterator = kind(Data(), 4)
updater = chainer.training.StandardUpdater(iterator, Optimizer().setup(Model()))
trainer = chainer.training.Trainer(updater, (1000, "epoch"))
if where == "extension":
    trainer.extend(boom, name="boom", trigger=(5, "iteration"))
trainer.run(show_loop_exception_msg=show)
"""

CASES = {
    "forward": "where = 'forward'" + TRAINING,
    "extension": "where = 'extension'" + TRAINING,
    "thread": "where = 'thread'" + TRAINING,
    "worker": "where = 'worker'" + TRAINING,
    "collective": "from mn_comm import raise_on_all\nwith raise_on_all(comm):\n    boom()\n",
    "import": "boom()\nMPI.COMM_WORLD.Barrier()\n",
}


SOON = 30  # seconds: without waiting for the limit of the stall monitor, on a busy machine


def mpiexec(ranks, code, folder, **environ):
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    command = [launcher, "-n", str(ranks), sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )


def by_ranks(text):
    """Return text without the line that the node's witness adds where the launcher writes a long one of its own."""
    return "".join(line for line in text.splitlines(keepends=True) if "[chainermn]" not in line)


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("where", CASES)
def test_all_ranks_end_and_the_traceback_is_shown_once(where, show, tmp_path):
    longer = {"CHAINERMN_PATIENCE": "3"} if where == "collective" else {}  # others wait for rank 1 to show it
    job = mpiexec(3, f"{PREAMBLE}show = {show}\n{CASES[where]}", tmp_path, **longer)
    ended = time.time()
    (raised,) = re.findall(r"raising at ([0-9.]+)", job.stderr)[:1]
    assert ended - float(raised) < SOON
    assert job.returncode != 0
    # The exception of a worker is sent with the text of its traceback.
    assert by_ranks(job.stderr).count("ValueError: boom !") == (2 if where == "worker" else 1)
    assert job.stderr.count(", in boom") == 1
    assert len(re.findall(r"chainermn: uncaught exception on rank 1 \(.+\)", job.stderr)) == 1


ON_ALL = """
import sys, time
from mn_comm import create_communicator, expect_same
comm = create_communicator("naive")
try:
    expect_same(comm, "number of classes", 10 + comm.rank)
except ValueError:
    if comm.rank == 1:  # a busy machine
        time.sleep(0.5)
    print("a line of a traceback\\n" * 20, file=sys.stderr)
    raise
"""


def test_an_exception_on_all_ranks_is_shown_once_and_last(tmp_path):
    # The first rank that ended the job cut the output of the others short, or their tracebacks came after its message.
    job = mpiexec(3, ON_ALL, tmp_path, CHAINERMN_PATIENCE="3")
    assert job.returncode == 1
    assert job.stderr.count("a line of a traceback") == 60
    last = job.stderr[job.stderr.rindex("a line of a traceback") :]
    assert by_ranks(last).count("ValueError: expected the same number of classes on every rank, got 10 on rank 0") == 1
    assert re.findall(r"uncaught exception on rank ([0-9])", last) == ["0"]


IN_PART = """
from mn_comm import create_communicator, expect_same
comm = create_communicator("naive")
part = comm.split(comm.rank == 0, 0)
if comm.rank:
    expect_same(part, "number of classes", 10 + comm.rank)
comm.bcast_obj(None)
comm.bcast_obj(None, root=1)
"""


def test_an_exception_on_all_ranks_of_a_group_ends_the_job(tmp_path):
    started = time.monotonic()
    job = mpiexec(3, IN_PART, tmp_path)
    assert time.monotonic() - started < SOON
    assert job.returncode == 1
    assert "ValueError: expected the same number of classes on every rank, got 11 on rank 0" in job.stderr


BY_DEFAULT = """
import os, signal, sys, time
from mn_comm import create_communicator
comm = create_communicator("naive")
if comm.rank == comm.size - 1:
    print("raising at", time.time(), file=sys.stderr, flush=True)
    {}
comm.bcast_obj(None)
comm.bcast_obj(None, root=comm.size - 1)
"""


@pytest.mark.parametrize("what", ["raise ValueError('boom')", "signal.raise_signal(signal.SIGINT)"])
def test_all_ranks_end_without_a_hook_in_the_script(what, tmp_path):
    job = mpiexec(3, BY_DEFAULT.format(what), tmp_path)
    (raised,) = re.findall(r"raising at ([0-9.]+)", job.stderr)
    assert time.time() - float(raised) < SOON
    assert job.returncode != 0
    is_interrupted = "SIGINT" in what
    assert job.stderr.count("Traceback (most recent call last)") == (not is_interrupted)
    reason = "interrupted" if is_interrupted else "uncaught exception"
    assert len(re.findall(rf"chainermn: {reason} on rank 2 \(.+\): ending all ranks", job.stderr)) == 1


PRESSED = """
import sys
import chainer, numpy as np
from mn_comm import create_communicator
comm = create_communicator("naive")
comm.mpi_comm.Barrier()
class Optimizer(chainer.optimizers.SGD):
    def update(self, lossfun=None, *args, **kwds):
        self.target.cleargrads()
        lossfun(*args, **kwds).backward()
        comm.multi_node_mean_grad(self.target)
        super().update()
def tell(trainer=None):
    if comm.rank == 0:
        print("now", flush=True)
def train(iterator):
    optimizer = Optimizer().setup(chainer.links.Classifier(chainer.links.Linear(2, 2)))
    trainer = chainer.training.Trainer(chainer.training.StandardUpdater(iterator, optimizer), (100000, "iteration"))
    trainer.extend(tell, name="tell", trigger=chainer.training.triggers.ManualScheduleTrigger(20, "iteration"))
    trainer.run()
data = chainer.datasets.TupleDataset(np.ones((100, 2), "f4"), np.zeros(100, "i4"))
"""

AT = {
    "a training": "train(chainer.iterators.SerialIterator(data, 4))",
    "the data loader's workers": """
import multiprocessing, time
def ignores_ctrl_c(process):
    with open(f"/proc/{process}/status") as file:
        (ignored,) = [line.split()[1] for line in file if line.startswith("SigIgn:")]
    return int(ignored, 16) >> 1 & 1
def tell_when_they_ignore_it(trainer, tell=tell):  # a worker that starts late would print a traceback
    while not all(ignores_ctrl_c(child.pid) for child in multiprocessing.active_children()):
        time.sleep(0.01)
    comm.mpi_comm.Barrier()
    tell()
tell = tell_when_they_ignore_it
train(chainer.iterators.MultiprocessIterator(data, 4, n_processes=2))
""",
    "a collective": "tell(); comm.recv_obj(1 - comm.rank)",
    "one rank's computation": """
tell()
if comm.rank == 0:
    comm.recv_obj(1)
while True:
    sum(range(1000))
""",
}


def press(code, folder, **environ):
    """Press Ctrl-C when a script on two ranks requests it; return the job and its output."""
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    job = subprocess.Popen(
        [launcher, "-n", "2", sys.executable, "-c", PRESSED + code],
        cwd=folder,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # like a terminal, which sends it to all processes of a group
    )
    try:
        assert job.stdout.readline() == "now\n"
        os.killpg(job.pid, signal.SIGINT)
        output, errors = job.communicate(timeout=SOON)
        return job, output, errors
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.mark.parametrize("at", AT)
def test_ctrl_c(at, tmp_path):
    job, output, errors = press(AT[at], tmp_path, CHAINERMN_PATIENCE="4")
    assert job.returncode != 0
    assert "Traceback" not in errors
    if "[mpiexec@" in output:  # MPICH's; Open MPI's ends the ranks itself, by SIGTERM
        assert len(re.findall("chainermn: interrupted on rank . .+: ending all ranks", errors)) == 1, errors


SAVES = {
    "while another rank waits": """
import os, threading
from mn_comm.building_blocks import activity
def note(doing):
    while doing.wait is None:
        time.sleep(0.01)
    open("waits", "w").close()
try:
    comm.gather_obj("inside")
    if comm.rank == 0:
        while not os.path.exists("waits"):
            time.sleep(0.01)
        tell()
        time.sleep(60)
    threading.Thread(target=note, args=[activity()]).start()
    comm.bcast_obj(None)
except KeyboardInterrupt:
    if comm.rank == 0:
        time.sleep(6)  # longer than anybody is waited for
        comm.bcast_obj("end")
        print("saved", flush=True)
""",
    "while it waits itself": """
try:
    comm.gather_obj("inside")
    tell()
    while True:  # no other thread learns of the signal before this one
        pass
except KeyboardInterrupt:
    if comm.rank == 0:
        print(comm.recv_obj(1), flush=True)
    else:
        time.sleep(4)  # longer than a rank may stay where a signal has found it
        comm.send_obj("saved", 0)
""",
    "in a finally clause": """
try:
    comm.gather_obj("inside")
    tell()
    while True:
        time.sleep(0.1)
finally:
    if comm.rank == 0:
        time.sleep(2.2)
        print("saved", flush=True)
""",
    "after a handler of its own": """
pressed = []
there = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))  # a step that is not to be cut in two
comm.gather_obj("inside")
tell()
while not pressed:
    time.sleep(0.05)
signal.signal(signal.SIGINT, there)
if comm.rank == 0:
    for _ in range(60):
        time.sleep(0.1)
    print("saved", flush=True)
comm.mpi_comm.Barrier()
""",
    "after a long call of C": """
began = time.monotonic()
hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
four_seconds = int(4_000_000 / (time.monotonic() - began))
try:
    comm.gather_obj("inside")
    tell()
    if comm.rank == 0:
        hashlib.pbkdf2_hmac("sha256", b"", b"", four_seconds)
    time.sleep(60)
except KeyboardInterrupt:
    if comm.rank == 0:
        print("saved", flush=True)
comm.mpi_comm.Barrier()
""",
}


@pytest.mark.parametrize("what", SAVES)
def test_a_script_that_saves_after_ctrl_c_is_not_cut_short(what, tmp_path):
    longer = {"CHAINERMN_PATIENCE": "3"} if what == "in a finally clause" else {}
    _, output, errors = press("import hashlib, signal, time" + SAVES[what], tmp_path, **longer)
    if "[mpiexec@" in output:
        assert "saved\n" in output, errors


NO_STDERR = {
    "closed": "with open('log', 'w') as sys.stderr:\n        1 / 0",
    "none": "sys.stderr = None\n    1 / 0",
    "closed, and an exit": "with open('log', 'w') as sys.stderr:\n        sys.exit(1)",
}


@pytest.mark.parametrize("how", NO_STDERR)
def test_all_ranks_end_where_nothing_can_be_said(how, tmp_path):
    assert mpiexec(2, EXIT.format(NO_STDERR[how]), tmp_path).returncode == 1


def test_all_ranks_end_where_only_the_name_is_wrong(tmp_path):
    code = "from mpi4py import MPI\nfrom mn_comm import create_communicator\n"
    script = code + "create_communicator('naive' if MPI.COMM_WORLD.rank else 'nave')"
    job = mpiexec(2, script, tmp_path, CHAINERMN_PATIENCE="3")
    assert job.returncode == 1
    assert job.stderr.count("got 'nave'") == 1


QUIET = {
    "the variable": ("", "hook = sys.__excepthook__", {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}),
    "a hook of its own": ("sys.excepthook = hook = lambda *args: None", "", {}),
    "an interactive session": ("sys.ps1 = '>'", "hook = sys.__excepthook__", {}),
}


@pytest.mark.parametrize("why", QUIET)
def test_scripts_that_are_left_alone(why, tmp_path):
    before, after, environ = QUIET[why]
    code = f"import sys\n{before}\nfrom mn_comm import create_communicator\ncreate_communicator('naive')\n{after}\n"
    job = mpiexec(2, code + "assert sys.excepthook is hook\n", tmp_path, **environ)
    assert job.returncode == 0, job.stderr


def test_a_child_of_a_rank_is_no_rank(tmp_path):
    code = """
import os, sys, warnings
from mn_comm import create_communicator
from mn_extensions import global_except_hook
comm = create_communicator("naive")
warnings.simplefilter("error")
global_except_hook.add_hook()  # no warning: the script has not added it before
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        raise KeyError("in the child")
    except KeyError:
        sys.excepthook(*sys.exc_info())
    os._exit(3)
assert os.waitpid(child, 0)[1] == 3 << 8
print(comm.allreduce_obj(1))
"""
    job = mpiexec(2, code, tmp_path)
    assert job.returncode == 0, job.stderr
    assert "ending all ranks" not in job.stderr
    assert job.stderr.count("in the child") == 2


def test_without_a_job(tmp_path):
    job = subprocess.run([sys.executable, "-c", PREAMBLE + "raise KeyError(1)"], capture_output=True, text=True)
    assert job.returncode != 0
    assert job.stderr.count("KeyError: 1") == 1


EXIT = """
import argparse, multiprocessing, sys, threading
from mn_comm import create_communicator
comm = create_communicator("naive")
def end(status):
    sys.exit(status)
if comm.rank == 1:
    {}
comm.bcast_obj(None, root=1)
"""

ENDS = {
    "a message": ("sys.exit('bad argument')", 1, "bad argument\n"),
    "a status": ("end(7)", 7, ""),
    "argparse": ("argparse.ArgumentParser().parse_args(['--what'])", 2, "unrecognized arguments: --what\n"),
    "another one": ("try:\n        end(3)\n    finally:\n        end(5)", 5, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_exit_status_ends_all_ranks(how, tmp_path):
    code, status, said = ENDS[how]
    job = mpiexec(3, EXIT.format(code), tmp_path)
    assert job.returncode == status
    assert said in job.stderr
    assert len(re.findall(rf"chainermn: exit status {status} on rank 1 \(.+\): ending all ranks", job.stderr)) == 1
    assert "Traceback" not in job.stderr


GOES_ON = {
    "caught": "try:\n        end(3)\n    except SystemExit:\n        pass",
    "caught and kept": "try:\n        end(3)\n    except SystemExit as error:\n        kept = error",
    "in a thread": "thread = threading.Thread(target=end, args=(3,)); thread.start(); thread.join()",
    "in a child": "c = multiprocessing.get_context('fork').Process(target=end, args=(3,)); c.start(); c.join()",
    "as the end of all": "comm.bcast_obj(None, root=1); end(0)",
}


@pytest.mark.parametrize("how", GOES_ON)
def test_exits_that_end_nothing_else(how, tmp_path):
    # A rank that ends much later than the other one would not be waited for otherwise, and UCX would write a warning.
    job = mpiexec(2, EXIT.format(GOES_ON[how]), tmp_path, CHAINERMN_PATIENCE="10")
    assert (job.returncode, job.stderr) == (0, "")


HARMLESS = {
    "exit": ("sys.exit(7)", 7),
    "no exit": ("pass", 0),
    "thread": ("t = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join(); sys.exit(3)", 3),
}


@pytest.mark.parametrize("hook", [True, False])
@pytest.mark.parametrize("what", HARMLESS)
def test_threads_and_exits_are_pythons_own(what, hook):
    code, status = HARMLESS[what]
    preamble = PREAMBLE if hook else PREAMBLE.replace("global_except_hook.add_hook()", "")
    job = subprocess.run([sys.executable, "-c", preamble + code], capture_output=True, text=True)
    assert job.returncode == status
    assert "uncaught exception on rank" not in job.stderr
    assert job.stderr.count("ZeroDivisionError") == (what == "thread")


def test_the_hook_is_added_once():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "from mn_extensions import global_except_hook as g\n"
        "g.add_hook()\ntry:\n    g.add_hook()\nexcept UserWarning as w:\n    print(w)\n"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "already" in job.stdout
