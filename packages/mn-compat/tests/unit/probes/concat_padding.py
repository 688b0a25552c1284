import numpy

SYMPTOM = "OverflowError"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 wraps around"


def probe():
    from chainer.dataset import concat_examples

    batch = [numpy.array([1, 2], numpy.uint8), numpy.array([3], numpy.uint8)]
    assert concat_examples(batch, padding=-1).tolist() == [[1, 2], [3, 255]]
    batch = [x.astype(numpy.float32) for x in batch]
    assert concat_examples(batch, padding=-0.5).tolist() == [[1, 2], [3, -0.5]]
