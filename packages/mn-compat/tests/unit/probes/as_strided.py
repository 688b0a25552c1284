import numpy

SYMPTOM = "sctypes"


def needless():
    return "NumPy 1 has sctypes" if hasattr(numpy, "sctypes") else ""


def probe():
    import chainer
    import chainer.functions as F

    x = chainer.Variable(numpy.arange(4, dtype=numpy.float32))
    y = F.as_strided(x, (3, 2), (1, 1), 0)
    y.grad = numpy.ones((3, 2), numpy.float32)
    y.backward()
    assert x.grad.tolist() == [1, 2, 2, 1]
