"""Train with a strategy of your own: a ring. Its package comes first.

    pip install ./examples/features/ring
    mpiexec -n 3 python examples/features/own_strategy.py

With ``--device @cupy``, it trains on GPUs.
"""

import time

import chainer
import chainermn
from setting import batches, draw, get_device, get_digits, make_model, parse_options


def train(name, args):
    """Return the losses and the milliseconds of a step with a communicator, and the sum of the last weights."""
    comm = chainermn.create_communicator(name)
    device = get_device(args.device, comm)
    digits, _ = get_digits()
    model = make_model(500, 500, device=device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
    stream = batches(comm, digits, 25, device, args.steps + 1)
    optimizer.update(model, *next(stream))  # distributes the parameters
    losses = []
    began = time.perf_counter()
    for batch in stream:
        optimizer.update(model, *batch)
        losses.append(float(model.loss.array))
    elapsed = time.perf_counter() - began
    return comm.rank, losses, 1000 * elapsed / args.steps, float(abs(model.predictor[0].W.array).sum())


def main():
    args = parse_options(__doc__, steps=100)
    curves = {}
    for name in ("ring", "flat", "hierarchical"):
        rank, losses, milliseconds, weights = train(name, args)
        curves[name] = range(args.steps), losses
        if rank == 0:
            print(f"{name:12} loss {losses[-1]:.4f}, sum of the weights {weights:.3f}, {milliseconds:.1f} ms a step")
    if rank == 0:
        draw(f"{args.out}/own_strategy.png", curves, "step", "loss")


if __name__ == "__main__":
    main()
