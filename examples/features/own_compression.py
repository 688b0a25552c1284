"""Write a compression: 4 bits for each element, with error feedback, in snapshots, and everywhere where `send=` is.

    mpiexec -n 2 python own_compression.py

With ``--device @cupy``, it trains on GPUs.
"""

import chainer
import chainermn
import numpy as np
from chainermn.optimizers import AfterBackward, MultiNodeOptimizer
from setting import accuracy, batches, draw, get_device, get_digits, make_model, parse_options

from mn_compress import Compression, Int8
from mn_compress.blocks import BlockExchange


class Int4(Compression):
    """Integers from -7 to 7, and a scale for each block of elements: an eighth of the bytes."""

    def exchange(self, portion):
        """Return what averages a part of the gradients."""
        return BlockExchange(Int4Codec(), portion, None)


class Int4Codec:
    """Writes the blocks of a message; what it rounds away stays with the process, and is added in the next step."""

    block = 128

    def nbytes(self, length):
        """Return the size of the message for this number of elements."""
        return -(-length // self.block) * (4 + self.block // 2)

    def encode(self, values, message, random, said=None):
        """Write a message, and leave in ``values`` what it omits."""
        padded = np.pad(values, (0, -values.size % self.block)).reshape(-1, self.block)
        scales = np.abs(padded).max(1) / np.float32(7)
        codes = np.nan_to_num(np.rint(padded / np.maximum(scales, 1e-30)[:, np.newaxis]) + 8)
        pairs = (codes[:, ::2] * 16 + codes[:, 1::2]).astype(np.uint8)
        message[:] = np.concatenate([scales.astype(np.float32).view(np.uint8), pairs.ravel()])
        said = np.empty_like(values) if said is None else said
        self.decode(message, said)
        values[:] = np.where(np.isfinite(said), values - said, 0)  # a NaN reaches all processes, and is not kept

    def decode(self, message, values):
        """Overwrite ``values`` with what a message says."""
        split = 4 * -(-values.size // self.block)
        pairs = message[split:].reshape(-1, self.block // 2)
        codes = np.stack([pairs // 16, pairs % 16], axis=2).reshape(len(pairs), self.block)
        scaled = (codes.astype(np.float32) - 8) * message[:split].view(np.float32)[:, np.newaxis]
        values[:] = scaled.ravel()[: values.size]


def main():
    args = parse_options(__doc__, steps=200)
    comm = chainermn.create_communicator("flat")
    device = get_device(args.device, comm)
    digits, test = get_digits()
    curves = {}
    for name, send in {"exact": None, "Int8()": Int8(), "Int4()": Int4()}.items():
        model = make_model(100, device=device)
        when = AfterBackward(send=send)
        optimizer = MultiNodeOptimizer(chainer.optimizers.MomentumSGD(0.05), comm, when).setup(model)
        losses = []
        for batch in batches(comm, digits, 25, device, args.steps):
            optimizer.update(model, *batch)
            losses.append(float(model.loss.array))
        ratio = 1.0 if optimizer.compression_report is None else optimizer.compression_report.ratio
        if comm.rank == 0:
            print(f"{name:7} {ratio:.3f} of the bytes, accuracy {accuracy(model, test, device):.3f}")
        curves[name] = range(args.steps), losses
    if comm.rank == 0:
        draw(f"{args.out}/own_compression.png", curves, "step", "loss")


if __name__ == "__main__":
    main()
