import types

import numpy

SYMPTOM = "Not equal to tolerance"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 adds scalars in float64"


def probe():
    import chainer
    from chainer.training import extensions

    values = numpy.random.RandomState(0).normal(1.2, 0.1, 2000).astype(numpy.float16)
    average = extensions.MicroAverage("sum", "count", "mean", trigger=lambda trainer: trainer.last)
    reporter = chainer.Reporter()
    with reporter:
        for i, value in enumerate(values):
            observation = {"sum": value, "count": numpy.float16(1)}
            average(types.SimpleNamespace(observation=observation, last=i == len(values) - 1))
    exact = values.astype(numpy.float64).mean()
    numpy.testing.assert_allclose(reporter.observation["mean"], exact, rtol=1e-12)
