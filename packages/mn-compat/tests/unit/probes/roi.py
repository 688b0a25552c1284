import numpy

SYMPTOM = "not equal"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 computes coordinates in float64"


def forward_and_backward(function, x, *args):
    import chainer

    x = chainer.Variable(x)
    y = function(x, *args)
    y.grad = numpy.ones_like(y.array)
    y.backward()
    return y.array, x.grad


def same(one, other):
    for a, b in zip(one, other, strict=True):
        numpy.testing.assert_allclose(a, b, rtol=1e-5, err_msg="not equal")


def probe():
    import chainer.functions as F

    x = numpy.random.RandomState(0).rand(1, 1, 40, 40).astype(numpy.float32)
    index = numpy.zeros(1, numpy.int32)

    # 45 * 0.7 is just below 31.5 in float64, and just above it in float32: the edge is rounded to 31, or to 32.
    edges = numpy.array([[5, 5, 45, 45]], numpy.float32)
    rounded = numpy.array([[4, 4, 31, 31]], numpy.float32)
    for function in (F.roi_average_pooling_2d, F.roi_max_pooling_2d):
        same(
            forward_and_backward(function, x, edges, index, 2, 0.7),
            forward_and_backward(function, x, rounded, index, 2, 1.0),
        )
    with_index = [numpy.insert(rois, 0, 0, axis=1) for rois in (edges, rounded)]
    same(
        forward_and_backward(F.roi_pooling_2d, x, with_index[0], 2, 2, 0.7),
        forward_and_backward(F.roi_pooling_2d, x, with_index[1], 2, 2, 1.0),
    )

    # 50 * 0.6 / 2 is 15 in float64, and a little more in float32: 15 samples in a bin, or 16.
    corners = numpy.array([[0, 0, 50, 50]], numpy.float32)
    for function in (F.roi_average_align_2d, F.roi_max_align_2d):
        same(
            forward_and_backward(function, x, corners, index, 2, 0.6),
            forward_and_backward(function, x, corners, index, 2, 0.6, 15),
        )
