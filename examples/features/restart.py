"""Lose all processes, and go on at the last saved step: the job is started again, the state is held in memory.

    chainermn elastic -n 2 restart.py

It works with MPICH and with Open MPI.
"""

import chainermn
from setting import draw, get_device, kill, make_trainer, parse_options


def main():
    args = parse_options(__doc__, steps=120, keep=25, kill=60)
    comm = chainermn.create_communicator()
    device = get_device(args.device, comm)
    trainer = make_trainer(comm, device, args.steps, args.out)

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
