"""Train on parts of different lengths: every sample counts once, and no process waits for one that has no data left.

    mpiexec -n 2 python uneven.py

With ``--device @cupy``, it trains on GPUs.
"""

import chainer
import chainermn
from setting import accuracy, draw, get_device, get_digits, make_model, parse_options

BATCH = 20


def main():
    args = parse_options(__doc__, epochs=5)
    comm = chainermn.create_communicator()
    device = get_device(args.device, comm)
    digits, test = get_digits()
    # Process i has i + 1 times as many samples as process 0: so many were on its disk.
    n_all = len(digits[0])
    ends = [n_all * i * (i + 1) // (comm.size * (comm.size + 1)) for i in range(comm.size + 1)]
    mine = slice(ends[comm.rank], ends[comm.rank + 1])
    images, labels = (device.send(array[mine]) for array in digits)

    model = make_model(100, device=device)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    samples, losses = [], []
    for _ in range(args.epochs):
        with optimizer.join():
            for begin in range(0, len(images), BATCH):
                batch = images[begin : begin + BATCH], labels[begin : begin + BATCH]
                optimizer.update(model, *batch)
                samples.append(len(batch[0]))
                losses.append(float(model.loss.array))
    done = comm.gather_obj((len(images), len(samples), sum(samples), losses))
    if comm.rank == 0:
        print("process  samples  batches in an epoch  samples used  steps")
        for rank, (n_samples, n_batches, n_used, _) in enumerate(done):
            print(f"{rank:7}  {n_samples:7}  {n_batches // args.epochs:19}  {n_used:12}  {optimizer.t:5}")
        print(f"accuracy {accuracy(model, test, device):.3f}")
        curves = {f"process {rank}": (range(len(each[3])), each[3]) for rank, each in enumerate(done)}
        draw(f"{args.out}/uneven.png", curves, "mini-batches that the process has had", "loss")


if __name__ == "__main__":
    main()
