import numpy

SYMPTOM = "Not equal to tolerance|divide by zero|overflow"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 adds scalars in float64"


def probe():
    import chainer
    from chainer import optimizer_hooks

    def model(gradient):
        link = chainer.Sequential(*(chainer.Link(W=()) for _ in range(0)))
        for _ in range(2):
            child = chainer.Link()
            with child.init_scope():
                child.W = chainer.Parameter(numpy.ones(4, numpy.float16))
            child.W.grad = numpy.full(4, gradient, numpy.float16)
            link.append(child)
        return link

    # Two sums of squares of 4 * 100**2 = 40,000 each: the maximum of float16 is 65,504.
    clipped = model(100)
    optimizer = chainer.optimizers.SGD().setup(clipped)
    optimizer_hooks.GradientClipping(1.0)(optimizer)
    for param in clipped.params():
        numpy.testing.assert_allclose(param.grad, 100 / numpy.sqrt(80_000), rtol=1e-3)

    # A gradient of zero: eps, 1e-9, avoids a division by zero.
    scaled = model(0)
    for param in scaled.params():
        optimizer_hooks.GradientLARS()(param.update_rule, param)
        numpy.testing.assert_allclose(param.grad, 0)
