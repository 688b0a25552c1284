import numpy

SYMPTOM = "dtype|float64"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 lets a scalar give way"


def probe():
    import chainer
    import chainer.links as L

    x = chainer.Variable(numpy.random.RandomState(0).rand(8, 6).astype(numpy.float32))
    y = L.BatchRenormalization(6, rmax=numpy.float64(3), dmax=numpy.float64(5))(x)
    assert y.dtype == numpy.float32, f"dtype {y.dtype}"
    y.grad = numpy.ones_like(y.array)
    y.backward()
    assert x.grad.dtype == numpy.float32, f"dtype {x.grad.dtype}"
