"""Replace a process that is killed by a spare, which waits from the start. It needs Open MPI.

    CHAINERMN_SPARES=1 mpiexec --with-ft ulfm -n 3 python spare.py

Two processes train. ``--victim 0`` kills the one that prints.
"""

import chainer
import chainermn
from chainer.training import PRIORITY_WRITER
from setting import draw, get_device, kill, make_trainer, parse_options


def main():
    args = parse_options(__doc__, steps=120, victim=1)
    comm = chainermn.create_communicator("two_dimensional", elastic=True)
    device = get_device(args.device, comm)
    trainer = make_trainer(comm, device, args.steps, args.out)
    trainer.extend(lambda _: chainer.report({"processes": comm.size}), "size", (1, "iteration"), PRIORITY_WRITER)

    # A spare receives the state of the training from this extension.
    keeper = chainermn.extensions.create_memory_keeper(comm)
    trainer.extend(keeper, trigger=(50, "iteration"))
    # The spare waits in this call, until it is needed or the training is over.
    joined = keeper.maybe_load(trainer)
    if comm.rank == args.victim and joined is None:
        trainer.extend(kill, trigger=(args.steps // 2, "iteration"))
    trainer.run()
    if joined is not None:
        print(f"the spare has trained since step {joined}, as process {comm.rank}")
    if comm.rank == 0:
        log = trainer.get_extension("LogReport").log
        steps, losses, sizes = zip(*((e["iteration"], e["main/loss"], e["processes"]) for e in log), strict=True)
        first, least, last = int(sizes[0]), int(min(sizes)), int(sizes[-1])
        print(f"processes: {first} at first, {least} for a moment, {last} at the end; loss {losses[-1]:.3f}")
        curves = {"loss of process 0": (steps, losses), "processes": (steps, sizes)}
        draw(f"{args.out}/spare.png", curves, "step", "")


if __name__ == "__main__":
    main()
