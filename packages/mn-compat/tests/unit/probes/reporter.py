import numpy

SYMPTOM = "Not equal to tolerance"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 adds scalars in float64"


def probe():
    import chainer

    values = numpy.random.RandomState(0).normal(1.2, 0.1, 2000)
    for dtype in (numpy.float32, numpy.float16):
        summary = chainer.DictSummary()
        for i, value in enumerate(values.astype(dtype)):
            # A value may be reported in two forms: a NumPy scalar, and a 0-d array in a Variable.
            summary.add({"x": value if i % 2 else chainer.Variable(numpy.array(value))})
        exact = values.astype(dtype).astype(numpy.float64)
        statistics = summary.make_statistics()
        numpy.testing.assert_allclose(statistics["x"], exact.mean(), rtol=1e-12)
        numpy.testing.assert_allclose(statistics["x.std"], exact.std(), rtol=1e-9)
