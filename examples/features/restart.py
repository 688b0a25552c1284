"""Lose all processes, and go on at the last saved step: the job is started again, the state is held in memory.

    chainermn elastic -n 2 restart.py

It works with MPICH and with Open MPI.
"""

import os
import signal

import chainer
import chainermn
from chainer.training import StandardUpdater, Trainer
from chainer.training.extensions import LogReport
from setting import draw, get_device, get_digits, make_model, parse_options


def kill(trainer):
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    args = parse_options(__doc__, steps=120, keep=25, kill=60)
    comm = chainermn.create_communicator()
    device = get_device(args.device, comm)
    (images, labels), _ = get_digits()
    data = chainer.datasets.TupleDataset(images, labels)
    iterator = chainermn.iterators.ElasticIterator(data, 60, comm, seed=0, global_batch=True)
    model = make_model(100, device=device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
    trainer = Trainer(StandardUpdater(iterator, optimizer, device=device), (args.steps, "iteration"), args.out)
    trainer.extend(LogReport(trigger=(1, "iteration"), filename=None))

    keeper = chainermn.extensions.create_memory_keeper(comm)
    trainer.extend(keeper, trigger=(args.keep, "iteration"))
    loaded = keeper.maybe_load(trainer)  # None at the first start
    if loaded is None:
        trainer.extend(kill, trigger=(args.kill, "iteration"))
    trainer.run()
    if comm.rank == 0 and loaded is not None:
        # The log is part of the trainer's state: it has the steps of both starts.
        log = trainer.get_extension("LogReport").log
        steps, losses = zip(*((entry["iteration"], entry["main/loss"]) for entry in log), strict=True)
        print(
            f"killed after step {args.kill}, continued after step {loaded}: {len(steps)} steps, loss {losses[-1]:.3f}"
        )
        first, again = (steps[:loaded], losses[:loaded]), (steps[loaded:], losses[loaded:])
        draw(f"{args.out}/restart.png", {"first start": first, "second start": again}, "step", "loss")


if __name__ == "__main__":
    main()
