import numpy

NEEDS = ("scipy",)
SYMPTOM = "float16|unsupported"


def probe():
    import chainer
    import chainer.functions as F

    dense = numpy.array([[0, 2, 0], [1, 0, 3]], numpy.float16)
    for dtype in (numpy.float16, numpy.float32, numpy.float64):
        sparse = chainer.utils.to_coo(dense.astype(dtype), requires_grad=True)
        x = chainer.Variable(numpy.ones((3, 2), dtype))
        y = F.sparse_matmul(sparse, x)
        assert y.dtype == dtype
        assert y.array.tolist() == [[2, 2], [4, 4]]
        y.grad = numpy.ones_like(y.array)
        y.backward()
        assert x.grad.dtype == dtype
        assert x.grad.tolist() == [[1, 1], [2, 2], [3, 3]]
    batch = chainer.utils.to_coo(numpy.stack([dense, dense]))
    y = F.sparse_matmul(batch, numpy.ones((2, 3, 2), numpy.float16))
    assert y.array.tolist() == [[[2, 2], [4, 4]]] * 2
