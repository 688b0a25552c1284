"""Images per second of training ResNet-50 on one GPU: Chainer in two precisions, and PyTorch if it is installed.

    python benchmarks/gpu_training.py --batch 64

``CUPY_TF32=1`` lets Chainer's matrix products use TF32, and PyTorch's, too. ``MN_COMPAT_SKIP=batch_statistics`` shows
what batch normalization costs without that fix.
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

PIXELS = 224


class ResNet(L.ResNet50Layers):
    """ResNet-50 with a loss."""

    def forward(self, x, t):
        """Return the loss."""
        return F.softmax_cross_entropy(super().forward(x, layers=["fc6"])["fc6"], t)


def in_chainer(batch: int, mixed: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of Chainer's, and a function that waits for it."""
    chainer.global_config.dtype = chainer.mixed16 if mixed else np.float32
    device = chainer.get_device("@cupy:0")
    device.use()
    model = ResNet(pretrained_model=None)
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    if mixed:
        optimizer.use_fp32_update()
        optimizer.loss_scaling()
    x = device.xp.random.standard_normal((batch, 3, PIXELS, PIXELS)).astype(np.float16 if mixed else np.float32)
    t = device.xp.zeros(batch, np.int32)
    return lambda: optimizer.update(model, x, t), lambda: device.device.synchronize()


def in_torch(batch: int, mixed: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a step of PyTorch's, with cuDNN, and a function that waits for it."""
    import torch
    import torchvision

    is_tf32 = os.environ.get("CUPY_TF32", "0") != "0"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = is_tf32
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x = torch.randn(batch, 3, PIXELS, PIXELS, device="cuda")
    t = torch.zeros(batch, dtype=torch.long, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()

    return step, torch.cuda.synchronize


def seconds_of(step: Callable[[], object], wait: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of a step, until the device has finished."""
    taken = []
    for _ in range(rounds + 3):
        wait()
        begin = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    libraries = {"Chainer": in_chainer}
    if importlib.util.find_spec("torchvision"):
        libraries["PyTorch"] = in_torch
    print(f"ResNet-50, batches of {options.batch}, {'TF32' if os.environ.get('CUPY_TF32') else 'no TF32'}")
    print(f"{'':28}{'ms':>8}{'images/s':>12}")
    for name, make in libraries.items():
        for mixed in (False, True):
            seconds = seconds_of(*make(options.batch, mixed), options.rounds)
            what = f"{name}, {'mixed precision' if mixed else 'float32'}"
            print(f"{what:28}{seconds * 1e3:8.1f}{options.batch / seconds:12.0f}", flush=True)


if __name__ == "__main__":
    main()
