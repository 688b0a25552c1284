import numpy

SYMPTOM = "Deprecat"


def needless():
    return "" if deprecated() else "numpy.fix is not deprecated yet"


def deprecated():
    try:
        numpy.fix(numpy.ones(1))
    except Warning:
        return True
    return False


def probe():
    import chainer.functions as F

    x = numpy.array([-1.7, -0.2, 0.2, 1.7], numpy.float32)
    y = F.fix(x).array
    assert y.tolist() == [-1, 0, 0, 1]
    assert numpy.signbit(y).tolist() == [True, True, False, False]
    assert y.dtype == numpy.float32
