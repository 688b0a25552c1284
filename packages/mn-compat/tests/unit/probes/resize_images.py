import numpy

SYMPTOM = "has no attribute 'float'"


def probe():
    import chainer.functions as F

    x = numpy.arange(4, dtype=numpy.float32).reshape(1, 1, 2, 2)
    for options in ({}, {"align_corners": False}, {"mode": "nearest", "align_corners": False}):
        y = F.resize_images(x, (4, 4), **options)
        assert y.dtype == numpy.float32
        numpy.testing.assert_allclose(y.array.mean(), 1.5, rtol=1e-6)
