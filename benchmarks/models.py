"""The sets of gradients that the benchmarks average."""

from __future__ import annotations

import chainer
import numpy as np

from mn_tools.bench.models import encoder, linear, resnet50

__all__ = ["MODELS", "make_model", "resnet50"]

MODELS = {
    "resnet50": resnet50(),
    "mlp": [(1000, 784), (1000,), (1000, 1000), (1000,), (10, 1000), (10,)],
    "small": [(256,)] * 1000,
    "large": [(100_000_000,)],
    "wire": [(1000, 1000)] * 4,
    "deep": linear(3 * 32 * 32, 2048, 2048, 2048, 2048, 768, 384, 10),
    "wide": encoder(4800, 384, 6),
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
