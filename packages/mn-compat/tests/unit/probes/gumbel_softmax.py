import numpy

SYMPTOM = "float64"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 lets a scalar give way"


def probe():
    import chainer.functions as F

    dtype = F.gumbel_softmax(numpy.zeros((2, 3), numpy.float32), tau=numpy.float64(0.3)).dtype
    assert dtype == numpy.float32, dtype
