import numpy

SYMPTOM = "dtype"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 lets a scalar give way"


def probe():
    import chainer
    import chainer.functions as F

    x = chainer.Variable(numpy.random.RandomState(0).rand(4, 6).astype(numpy.float32))
    y = F.layer_normalization(x, numpy.ones(6, numpy.float32), numpy.zeros(6, numpy.float32), eps=numpy.float64(1e-5))
    assert y.dtype == numpy.float32, f"dtype {y.dtype}"
    y.grad = numpy.ones_like(y.array)
    y.backward()
    assert x.grad.dtype == numpy.float32, f"dtype {x.grad.dtype}"
