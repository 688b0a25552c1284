"""A training that saves a checkpoint and ends when it is told to, and goes on from there when it is started again."""

import argparse
import signal
import sys

import chainer
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions

parser = argparse.ArgumentParser()
parser.add_argument("--epoch", type=int, default=10)
args = parser.parse_args()

comm = chainermn.create_communicator()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))

model = L.Classifier(L.Linear(64, 10))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
optimizer.setup(model)
random = np.random.RandomState(0)
x = random.rand(6400, 64).astype(np.float32)
data = chainer.datasets.TupleDataset(x, x[:, :10].argmax(axis=1).astype(np.int32))
iterator = chainer.iterators.SerialIterator(chainermn.scatter_dataset(data, comm), 32)
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (args.epoch, "epoch"), out="result")

checkpointer = chainermn.create_multi_node_checkpointer("train", comm)
trainer.extend(checkpointer, trigger=(5, "epoch"))


@trainer.extend
@training.make_extension(trigger=(1, "iteration"), priority=-200)
def stop_when_told(trainer):
    """End on all ranks after the same iteration: the signal does not reach them in the same one."""
    if comm.allreduce_obj(len(told)):
        checkpointer(trainer)
        if comm.rank == 0:
            print(f"stopped at iteration {trainer.updater.iteration}", flush=True)
        sys.exit()  # unlike the normal end, this keeps the checkpoints


if comm.rank == 0:
    trainer.extend(extensions.LogReport())
resumed = checkpointer.maybe_load(trainer, optimizer)
if comm.rank == 0 and resumed is not None:
    print(f"resumed at iteration {resumed}", flush=True)
trainer.run()
