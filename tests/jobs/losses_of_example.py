"""Runs an example for a few iterations, and writes its losses: ``losses_of_example.py FILE SCRIPT [ARGUMENT …]``.

Everything random is drawn in host memory, from the same seed. Ranks share GPUs if there are fewer.
"""

import json
import runpy
import sys
from pathlib import Path

import chainer
import chainermn
import numpy as np

ITERATIONS = 5

file, *sys.argv = sys.argv[1:]
losses = []
run = chainer.training.Trainer.run


def note(trainer):
    """Keep the losses of an iteration."""
    seen = trainer.observation.items()
    losses.append({name: float(value.array if hasattr(value, "array") else value) for name, value in seen})


def run_shortly(trainer, **options):
    """Train for a few iterations, and end the program."""
    trainer.stop_trigger = chainer.training.get_trigger((ITERATIONS, "iteration"))
    trainer.extend(note, trigger=(1, "iteration"))
    run(trainer, **options)
    rank = chainermn.create_communicator("naive").rank
    Path(f"{file}-{rank}").write_text(json.dumps(losses))
    raise SystemExit


def draw(initializer, array):
    """Draw initial weights, also those of which the shape is known only when the model is on the device."""
    values = np.random.normal(0, initializer.scale, array.shape).astype(array.dtype)
    array[...] = chainer.backend.get_device_from_array(array).send(values)


def shared(device, get_device=chainer.get_device):
    """Return a device, by its number one that exists."""
    if isinstance(device, int) and device >= 0:
        device %= chainer.backends.cuda.cupy.cuda.runtime.getDeviceCount()
    return get_device(device)


np.random.seed(0)
chainer.get_device = shared
chainer.initializers.Normal.__call__ = draw
chainer.training.Trainer.run = run_shortly
chainer.functions.dropout = lambda x, *args, **options: x
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
