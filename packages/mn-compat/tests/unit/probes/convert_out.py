import numpy

SYMPTOM = "Deprecat"


def needless():
    a = numpy.zeros(1, int)
    try:
        numpy.maximum(a, a, a)
    except Warning:
        return ""
    return "a positional out is not deprecated yet"


def probe():
    from chainer.dataset import concat_examples

    batch = [numpy.ones((1, 2), numpy.float32), numpy.ones((2, 1), numpy.float32)]
    assert concat_examples(batch, padding=0).tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
