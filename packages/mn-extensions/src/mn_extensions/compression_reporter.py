"""An extension that logs how much compression sends and omits."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.training import PRIORITY_WRITER, Extension


class CompressionReporter(Extension):  # type: ignore[misc]  # Chainer has no types
    """Reports what the compression of gradients did in the last step, for ``LogReport`` and ``PlotReport``.

    ``compression/bytes`` is the number of bytes that this rank has sent, and ``compression/ratio`` is this number
    divided by the number of bytes without compression. ``compression/error_norm`` is the norm of the part of the
    gradients that this rank has not sent yet, and ``compression/gradient_norm`` is the norm of the averaged gradients.
    Not collective; to combine the values of all ranks, add an ``ObservationAggregator`` after it.

    Args:
        optimizer: The name of the multi-node optimizer in the updater, or the optimizer itself.

    Raises:
        ValueError: When it is called: the optimizer does not compress.

    Example:
        >>> trainer.extend(mn_extensions.CompressionReporter())
    """

    trigger = 1, "iteration"
    priority = PRIORITY_WRITER
    name = "CompressionReporter"

    def __init__(self, optimizer: Any = "main") -> None:
        self._optimizer = optimizer

    def __call__(self, trainer: Any) -> None:
        """Report; not collective."""
        name = self._optimizer
        optimizer = trainer.updater.get_optimizer(name) if isinstance(name, str) else name
        report = getattr(optimizer, "compression_report", None)
        if report is None:
            raise ValueError(
                "expected a multi-node optimizer that sends compressed gradients, got one that does not "
                f"compress: {type(optimizer).__name__}"
            )
        values = {
            "bytes": report.bytes_sent,
            "ratio": report.ratio,
            "error_norm": report.error_norm,
            "gradient_norm": _norm_of_gradients(optimizer.target),
        }
        chainer.report({f"compression/{key}": value for key, value in values.items()})


def _norm_of_gradients(model: Any) -> float:
    grads = [param.grad for param in model.params() if param.data is not None and param.grad is not None]
    return float(sum(float((grad.astype("f4") ** 2).sum()) for grad in grads) ** 0.5)
