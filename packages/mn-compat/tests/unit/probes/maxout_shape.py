import numpy

SYMPTOM = "DeprecationWarning"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.5.0" else "deprecated from NumPy 2.5 on"


def probe():
    import chainer.links as L

    shapes = []

    def initializer(array):
        shapes.append(array.shape)
        array[...] = numpy.arange(array.size).reshape(array.shape)

    link = L.Maxout(3, 2, 4, initialW=initializer, initial_bias=initializer)
    assert shapes == [(2, 4, 3), (2, 4)]
    assert link.linear.W.array.ravel().tolist() == list(range(24))
    assert link.linear.W.shape == (8, 3)
    assert link.linear.b.array.tolist() == list(range(8))
