import numpy

SYMPTOM = "OverflowError|DeprecationWarning"


def needless():
    # NumPy warns from 1.24 on; NumPy 2 raises.
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "1.24.0" else "NumPy 1 wraps around"


def probe():
    import chainer.functions as F

    xs = [numpy.array([1, 2], numpy.uint8), numpy.array([3], numpy.uint8)]
    assert F.pad_sequence(xs, padding=-1).array.tolist() == [[1, 2], [3, 255]]
    xs = [x.astype(numpy.float32) for x in xs]
    assert F.pad_sequence(xs, padding=-0.5).array.tolist() == [[1, 2], [3, -0.5]]
