"""A small training in which rank 1 makes a mistake: ``mistaken_training.py NAME``. test_mistakes.py runs it."""

import os
import resource
import signal
import sys
from multiprocessing import parent_process

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np

mistake = sys.argv[1]
comm = chainermn.create_communicator("flat")
at_fault = comm.rank == 1
print(f"process {os.getpid()} is rank {comm.rank}", flush=True)


def end_by(number):
    os.kill(os.getpid(), number)


def read_address_zero():
    import ctypes

    ctypes.string_at(0)


def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def open_missing_file():
    np.load("pictures-of-rank-1.npz")


def fail(message):
    raise ValueError(message)


def import_missing_module():
    import albumentations_of_rank_1  # noqa: F401


DURING_TRAINING = {
    "exception in the loss": lambda: fail("expected a positive margin, got -1"),
    "exit with a text": lambda: sys.exit("the learning rate must be positive"),
    "exit with a status": lambda: sys.exit(3),
    "missing module": import_missing_module,
    "missing file": open_missing_file,
    "_exit": lambda: os._exit(5),
    "SIGKILL": lambda: end_by(signal.SIGKILL),
    "SIGSTOP": lambda: end_by(signal.SIGSTOP),
    "SIGTERM": lambda: end_by(signal.SIGTERM),
    "SIGSEGV": read_address_zero,
    "full disk": fill_the_disk,
}


class Data(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 40

    def get_example(self, i):
        if mistake == "dead worker" and at_fault and i == 30 and parent_process():
            end_by(signal.SIGKILL)
        return np.ones(4, "f4"), np.int32(0)


class Model(chainer.Chain):
    def __init__(self, classes=2, extra=False, dtype="f4"):
        with chainer.using_config("dtype", np.dtype(dtype)):
            super().__init__(l=L.Linear(4, classes))
        if extra:
            self.add_link("extra", L.Linear(classes, classes))

    def forward(self, x, t):
        if at_fault and updater.iteration == 3:
            DURING_TRAINING.get(mistake, lambda: None)()
            if mistake == "missing batch":
                comm.recv_obj(2)
        return F.softmax_cross_entropy(self.l(F.cast(x, self.l.W.dtype)), t)


def raise_in_extension(trainer):
    if at_fault and mistake == "exception in an extension":
        fail("expected a picture of the losses, got none")


if mistake == "exception before training" and at_fault:
    fail("expected --batch-size of at least 1, got 0")

iterations = 6 if mistake == "fewer iterations" and at_fault else 10**6 if mistake == "Ctrl-C" else 9
options = {"wrong shape": {"classes": 3}, "wrong dtype": {"dtype": "f8"}, "another model": {"extra": True}}
model = Model(**options.get(mistake, {}) if at_fault else {})
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
if mistake == "dead worker":
    # In order: Chainer fetches the first batch in the process of the rank, which must not be the one with the mistake.
    iterator = chainer.iterators.MultiprocessIterator(Data(), 5, n_processes=2, shuffle=False)
else:
    iterator = chainer.iterators.SerialIterator(Data(), 5)
updater = chainer.training.StandardUpdater(iterator, optimizer, loss_func=model)
trainer = chainer.training.Trainer(updater, (iterations, "iteration"), out="result")
trainer.extend(raise_in_extension, trigger=(4, "iteration"), name="picture")
if mistake == "full disk":
    checkpointer = chainermn.create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(4, "iteration"))
if mistake == "Ctrl-C":
    press = chainer.training.triggers.ManualScheduleTrigger(3, "iteration")
    trainer.extend(lambda _: comm.rank or print("press", flush=True), trigger=press, name="press")
trainer.run()
print("finished", flush=True)
