"""Train in several ways that send fewer bytes, and draw the accuracy over the bytes that each has sent.

    mpiexec -n 2 python fewer_bytes.py
    mpiexec -n 2 python fewer_bytes.py --way local_sgd

With ``--device @cupy``, it trains on GPUs.
"""

import chainermn
from chainer.optimizers import MomentumSGD, NesterovAG
from chainermn.optimizers import (
    AfterBackward,
    Asynchronous,
    DiLoCo,
    LocalSGD,
    MultiNodeOptimizer,
    StreamingDiLoCo,
    SynchronousFirst,
)
from setting import accuracy, batches, draw, get_device, get_digits, make_model, parse_options

from mn_compress import Int8, OneBit, PowerSGD, TopK

STEPS_BETWEEN_TESTS = 10
# The value of `when` for each way. `count` averages exactly, and counts the bytes.
WAYS = {
    "exact": lambda count: AfterBackward(send=count),
    "int8": lambda count: AfterBackward(send=Int8()),
    "one_bit": lambda count: AfterBackward(send=OneBit(block=64)),
    "top_k": lambda count: AfterBackward(send=TopK(0.05)),
    "power_sgd": lambda count: AfterBackward(send=PowerSGD(2, start_iter=10)),
    "local_sgd": lambda count: LocalSGD(8, send=count),
    "local_sgd_int8": lambda count: LocalSGD(8, send=Int8()),
    "diloco": lambda count: DiLoCo(16, outer=NesterovAG(lr=0.7, momentum=0.5), send=count),
    "streaming": lambda count: StreamingDiLoCo(16, outer=NesterovAG(lr=0.7, momentum=0.5), send=count),
    "asynchronous": lambda count: SynchronousFirst(10, then=Asynchronous(16), first=AfterBackward(send=count)),
}


def train(comm, way, args):
    """Return how many kilobytes a process has sent after some steps, and the accuracies then."""
    device = get_device(args.device, comm)
    digits, test = get_digits()
    model = make_model(100, device=device)
    n_bytes = sum(param.size for param in model.params()) * 4
    share = 2 * (comm.size - 1) / comm.size  # an average sends it from each process, for each byte
    sent = [0.0]

    def count(bucket):
        sent[0] += share * bucket.flat.nbytes
        return bucket.average()

    optimizer = MultiNodeOptimizer(MomentumSGD(0.05), comm, WAYS[way](count)).setup(model)
    kilobytes, accuracies = [], []
    for step, batch in enumerate(batches(comm, digits, 25, device, args.steps + 1)):
        optimizer.update(model, *batch)
        if optimizer.compression_report is not None:
            sent[0] += optimizer.compression_report.bytes_sent
        elif way == "asynchronous" and step > 10:
            sent[0] += share * n_bytes * optimizer.is_meeting
        if step % STEPS_BETWEEN_TESTS == 0 and sent[0]:
            kilobytes.append(sent[0] / 1000)
            accuracies.append(accuracy(model, test, device))
    optimizer.synchronize()
    return kilobytes, accuracies


def main():
    args = parse_options(__doc__, way="", steps=300)
    comm = chainermn.create_communicator("flat")
    curves = {way: train(comm, way, args) for way in ([args.way] if args.way else WAYS)}
    if comm.rank == 0:
        for way, (kilobytes, accuracies) in curves.items():
            print(f"{way:15} {kilobytes[-1]:8.0f} kB sent, accuracy {accuracies[-1]:.3f}")
        draw(f"{args.out}/fewer_bytes.png", curves, "kilobytes that a process has sent", "accuracy", xscale="log")


if __name__ == "__main__":
    main()
