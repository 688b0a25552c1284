import numpy

SYMPTOM = "dtype|float64"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 lets a scalar give way"


def probe():
    import chainer
    import chainer.functions as F

    x = chainer.Variable(numpy.random.RandomState(0).rand(2, 6).astype(numpy.float32))
    k, alpha, beta = map(numpy.float64, (2, 1e-4, 0.75))
    y = F.local_response_normalization(x, 5, k, alpha, beta)
    assert y.dtype == numpy.float32, f"dtype {y.dtype}"
    y.grad = numpy.ones_like(y.array)
    y.backward()
    assert x.grad.dtype == numpy.float32, f"dtype {x.grad.dtype}"
