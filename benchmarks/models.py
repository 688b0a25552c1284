"""The sets of gradients that the benchmarks average."""

from __future__ import annotations

from itertools import pairwise

import chainer
import numpy as np

__all__ = ["MODELS", "make_model", "resnet50"]


def resnet50() -> list[tuple[int, ...]]:
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


def _convolution(n_in: int, n_out: int, kernel: int) -> list[tuple[int, ...]]:
    """Return the shapes of a convolution without bias and of the batch normalisation that follows it."""
    return [(n_out, n_in, kernel, kernel), (n_out,), (n_out,)]


def _linear(*widths: int) -> list[tuple[int, ...]]:
    """Return the shapes of linear layers with biases, one after the other."""
    return [shape for n_in, n_out in pairwise(widths) for shape in ((n_out, n_in), (n_out,))]


def _transformer(words: int, width: int, layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of an encoder (Vaswani et al., arXiv:1706.03762), four times as wide within its layers."""
    normalisation: list[tuple[int, ...]] = [(width,), (width,)]
    attention = _linear(width, width) * 4  # queries, keys, values, and the output projection
    layer = attention + normalisation + _linear(width, 4 * width, width) + normalisation
    return [(words, width), *layer * layers]


MODELS = {
    "resnet50": resnet50(),
    "mlp": [(1000, 784), (1000,), (1000, 1000), (1000,), (10, 1000), (10,)],
    "small": [(256,)] * 1000,
    "large": [(100_000_000,)],
    "wire": [(1000, 1000)] * 4,
    "deep": _linear(3 * 32 * 32, 2048, 2048, 2048, 2048, 768, 384, 10),
    "wide": _transformer(4800, 384, 6),
    "even": [(1000, 1000)] * 25,
}
"""Shapes of float32: 161 arrays of 102 MB in all, 6 of 7 MB, 1,000 of 1 KiB each, one of 400 MB, four of 4 MB each.

``deep`` is seven linear layers over images of 32 by 32 pixels in three colours, 83 MB in 14 arrays; ``wide`` is a
transformer's encoder of six layers, 384 wide, with the embedding of 4,800 words, 50 MB in 97 arrays. ``even`` is 25
arrays of 4 MB each.
"""


def make_model(shapes: list[tuple[int, ...]]) -> chainer.Link:
    """Return a link with parameters of these shapes."""
    link = chainer.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i:04}", chainer.Parameter(np.zeros(shape, np.float32)))
    return link
