"""Kill a process in the middle of a training: the others go on, and so does the curve. It needs Open MPI.

    mpiexec --with-ft ulfm -n 3 python survive_a_kill.py

``--victim 0`` kills the process that prints.
"""

import os
import signal

import chainer
import chainermn
from setting import draw, get_device, get_digits, make_model, parse_options


def main():
    args = parse_options(__doc__, epochs=8, victim=1)
    comm = chainermn.create_communicator("two_dimensional", elastic=True)
    device = get_device(args.device, comm)
    (images, labels), _ = get_digits()
    data = chainer.datasets.TupleDataset(images, labels)
    # It deals every sample once in each epoch, also those of a process that is lost.
    iterator = chainermn.iterators.ElasticIterator(data, 60, comm, seed=0, global_batch=True)
    model = make_model(100, device=device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
    steps, losses, sizes, changes = [], [], [], []

    @comm.on_change
    def note(change):
        changes.append((len(steps), change))

    while iterator.epoch < args.epochs:
        if iterator.epoch == args.epochs // 2 and comm.rank == args.victim and not changes:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.update(model, *chainer.dataset.concat_examples(next(iterator), device))
        steps.append(len(steps))
        losses.append(float(model.loss.array))
        sizes.append(comm.size)

    if comm.rank == 0:
        for step, change in changes:
            print(f"step {step}: {change.old_size} processes become {change.size}")
        print(f"{len(steps)} steps, {sizes[0]} processes at first, {sizes[-1]} at the end, loss {losses[-1]:.3f}")
        kills = {f"process {args.victim} is killed": ([step, step], [0, max(losses)]) for step, _ in changes}
        curves = {"loss of process 0": (steps, losses), **kills}
        draw(f"{args.out}/survive_a_kill.png", curves, "step", "loss")


if __name__ == "__main__":
    main()
