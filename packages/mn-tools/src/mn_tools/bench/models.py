"""The models whose training is to be recommended: well-known ones by name, a user's own, or the arrays in a file."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mn_comm import CommunicatorBase, expect_same, raise_on_all

Shape = tuple[int, ...]


def linear(*widths: int) -> list[Shape]:
    """Return the shapes of linear layers with biases, one after the other."""
    return [shape for n_in, n_out in pairwise(widths) for shape in ((n_out, n_in), (n_out,))]


def resnet50() -> list[Shape]:
    """Return the shapes of the 161 arrays of a ResNet-50 (He et al., arXiv:1512.03385, table 1): 102 MB of float32."""
    shapes = _convolution(3, 64, 7)
    n_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(n_in, width, 1) + _convolution(width, width, 3) + _convolution(width, 4 * width, 1)
            if block == 0:
                shapes += _convolution(n_in, 4 * width, 1)
            n_in = 4 * width
    return [*shapes, (1000, n_in), (1000,)]


def _convolution(n_in: int, n_out: int, kernel: int) -> list[Shape]:
    """Return the shapes of a convolution without bias and of the batch normalisation that follows it."""
    return [(n_out, n_in, kernel, kernel), (n_out,), (n_out,)]


def encoder(words: int, width: int, layers: int) -> list[Shape]:
    """Return the shapes of an encoder (Vaswani et al., arXiv:1706.03762), four times as wide within its layers."""
    normalisation: list[Shape] = [(width,), (width,)]
    attention = linear(width, width) * 4  # queries, keys, values, and the output projection
    layer = attention + normalisation + linear(width, 4 * width, width) + normalisation
    return [(words, width), *layer * layers]


MODELS: dict[str, list[Shape]] = {
    "mlp": linear(784, 1000, 1000, 10),
    "resnet50": resnet50(),
    "transformer": encoder(4800, 384, 6),
}
"""Shapes of float32 by name.

``mlp`` has two hidden layers of 1,000 units (7 MB); ``resnet50`` is He et al.'s (102 MB); ``transformer`` is the
encoder of six layers, 384 wide, with the embedding of 4,800 words (50 MB).
"""


@dataclass(frozen=True)
class Arrays:
    """The arrays of a model, or of a part of it.

    Attributes:
        name: The name of the model.
        shapes: The shapes, in the order of the forward pass.
        share: Which part of the model's bytes they are.
    """

    name: str
    shapes: tuple[Shape, ...]
    share: float = 1.0

    @property
    def nbytes(self) -> int:
        """The bytes of float32."""
        return 4 * sum(map(math.prod, self.shapes))


def thin(arrays: Arrays, share: float) -> Arrays:
    """Return about a share of a model, with the same mixture of small and large arrays.

    Args:
        arrays: The model.
        share: The share of its bytes, above 0.
    """
    if share >= 1:
        return arrays
    order = sorted(range(len(arrays.shapes)), key=lambda i: math.prod(arrays.shapes[i]))
    every = math.ceil(1 / share)
    kept = sorted(order[every // 2 :: every])
    shapes = tuple(arrays.shapes[i] for i in kept)
    found = 4 * sum(map(math.prod, shapes)) / arrays.nbytes
    if not share / 2 <= found <= share * 2:  # a few large arrays: a part of each
        shapes = tuple((*(max(1, round(n * share)) for n in shape[:1]), *shape[1:]) for shape in arrays.shapes)
        found = 4 * sum(map(math.prod, shapes)) / arrays.nbytes
    return Arrays(arrays.name, shapes, found)


def shapes_of(comm: CommunicatorBase, spec: str) -> tuple[Arrays, Any]:
    """Find the arrays of a model; collective.

    Args:
        comm: The ranks.
        spec: A name in :data:`MODELS`; ``package.module:function``, where the function returns the model; or a file.

    Returns:
        The arrays, and the model if a function has returned it, or ``None``.

    Raises:
        RuntimeError: There is no such model, or it has no arrays (on every rank).
        ValueError: It is not the same on every rank (on every rank).
    """
    model = None
    with raise_on_all(comm), explain(f"--model {spec}"):
        if spec in MODELS:
            shapes = MODELS[spec]
        elif ":" in spec:
            model = function_at(spec)()
            shapes = _of_parameters(model)
        else:
            shapes = _in_file(spec)
        if not any(map(math.prod, shapes)):
            raise ValueError("expected a model with arrays of floats, found none")
    expect_same(comm, f"shapes of arrays in --model {spec}", [list(shape) for shape in shapes])
    return Arrays(spec, tuple(shapes)), model


def function_at(spec: str) -> Callable[..., Any]:
    """Import a function, also from the current folder.

    Args:
        spec: ``package.module:function``.
    """
    module, _, name = spec.partition(":")
    if os.getcwd() not in sys.path:  # it is there already if Python was started with -m
        sys.path.insert(0, os.getcwd())
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@contextmanager
def explain(what: str) -> Iterator[None]:
    """Turn any exception of what a user has named into one that says so."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def _of_parameters(model: Any) -> list[Shape]:
    shapes = []
    for name, param in model.namedparams():
        if param.data is None:
            raise ValueError(
                f"expected initialised parameters, got {name} without an array: call the model once before"
            )
        if param.data.dtype.kind == "f":
            shapes.append(tuple(param.data.shape))
    return shapes


def _in_file(path: str) -> list[Shape]:
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"expected {', '.join(MODELS)}, package.module:function, or a file; there is no file {path}"
        )
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as arrays:
            return [each.shape for each in map(arrays.__getitem__, arrays.files) if each.dtype.kind == "f"]
    with open(path, encoding="utf-8") as lines:
        return [_shape(line) for line in lines if line.strip()]


def _shape(line: str) -> Shape:
    sizes: Sequence[str] = re.split(r"[\sx,]+", line.strip().strip("()").rstrip(","))
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"expected the shape of an array on each line, such as 64x3x7x7; got {line.strip()!r}")
    return tuple(map(int, sizes))
