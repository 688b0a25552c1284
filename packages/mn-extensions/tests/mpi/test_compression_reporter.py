import types

import chainer
import numpy as np
import pytest

import mn_extensions  # noqa: F401 - before Chainer
from mn_comm.building_blocks import CompressionReport
from mn_extensions import CompressionReporter


def trainer_of(optimizer):
    updater = types.SimpleNamespace(get_optimizer={"main": optimizer}.__getitem__)
    return types.SimpleNamespace(updater=updater)


def test_it_reports_what_was_sent_and_the_norms():
    model = chainer.Link()
    with model.init_scope():
        model.a = chainer.Parameter(np.zeros((2, 2), "f4"))
        model.b = chainer.Parameter(np.zeros(3, "f2"))
        model.c = chainer.Parameter()
    model.a.grad = np.full((2, 2), 2, "f4")
    model.b.grad = np.array([300, 0, 0], "f2")  # its square overflows float16
    optimizer = types.SimpleNamespace(target=model, compression_report=CompressionReport(1000, 0.25, 7.0))
    for which in ("main", optimizer):
        observation, reporter = {}, chainer.Reporter()
        with reporter, reporter.scope(observation):
            CompressionReporter(which)(trainer_of(optimizer))
        assert observation == {
            "compression/bytes": 1000,
            "compression/ratio": 0.25,
            "compression/error_norm": 7.0,
            "compression/gradient_norm": pytest.approx(np.sqrt(16 + 300**2)),
        }


def test_an_optimizer_that_does_not_compress():
    with pytest.raises(ValueError, match="compressed gradients, got one that does not compress: SGD"):
        CompressionReporter()(trainer_of(chainer.optimizers.SGD()))
