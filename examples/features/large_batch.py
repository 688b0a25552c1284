"""Train with large mini-batches: what a larger learning rate, a warm-up, LARS and LAMB do.

    mpiexec -n 2 python large_batch.py

With ``--device @cupy``, it trains on GPUs.
"""

import chainer
import chainermn
from chainer.optimizers import MomentumSGD
from chainermn.optimizers import LAMB, gradual_warmup, linear_scaling
from setting import accuracy, batches, draw, get_device, get_digits, make_model, parse_options

SMALL, LR = 16, 0.02
# Whether the mini-batch is large, the optimizer, the learning rate that it ends with, and the epochs of warm-up.
WAYS = {
    "small": (False, MomentumSGD, lambda size: LR, 0),
    "large, same learning rate": (True, MomentumSGD, lambda size: LR, 0),
    "large, scaled": (True, MomentumSGD, lambda size: linear_scaling(LR, size, reference=SMALL), 0),
    "large, scaled, warm-up": (True, MomentumSGD, lambda size: linear_scaling(LR, size, reference=SMALL), 3),
    "large, LARS, warm-up": (True, MomentumSGD, lambda size: 0.02, 3),
    "large, LAMB, warm-up": (True, LAMB, lambda size: 0.02, 3),
}


def train(comm, way, args):
    """Return the epochs, and the accuracies after them."""
    is_large, optimizer_class, learning_rate, warm_up = WAYS[way]
    device = get_device(args.device, comm)
    digits, test = get_digits()
    model = make_model(100, 100, device=device)
    actual = optimizer_class()
    optimizer = chainermn.create_multi_node_optimizer(actual, comm).setup(model)
    if "LARS" in way:
        optimizer.add_hook(chainer.optimizer_hooks.GradientLARS())
    size = (args.large if is_large else SMALL) // comm.size * comm.size  # of all processes together
    lr = learning_rate(size)
    schedule = gradual_warmup(lr, start=lr / 100, epochs=warm_up) if warm_up else lambda epoch: lr
    steps_in_epoch = len(digits[0]) // size
    stream = batches(comm, digits, size // comm.size, device, args.epochs * steps_in_epoch)
    accuracies = []
    for epoch in range(args.epochs):
        for step in range(steps_in_epoch):
            # LAMB has Adam's name for it.
            setattr(actual, "alpha" if way.startswith("large, LAMB") else "lr", schedule(epoch + step / steps_in_epoch))
            optimizer.update(model, *next(stream))
        accuracies.append(accuracy(model, test, device))
    return range(1, args.epochs + 1), accuracies


def main():
    args = parse_options(__doc__, epochs=15, large=250)
    comm = chainermn.create_communicator()
    curves = {way: train(comm, way, args) for way in WAYS}
    if comm.rank == 0:
        for way, (_, accuracies) in curves.items():
            print(f"{way:27} after 5 epochs {accuracies[min(4, args.epochs - 1)]:.3f}, at the end {accuracies[-1]:.3f}")
        draw(f"{args.out}/large_batch.png", curves, "epoch", "accuracy", ylim=(0, 1))


if __name__ == "__main__":
    main()
