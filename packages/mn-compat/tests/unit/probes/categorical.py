import numpy

SYMPTOM = "tuple"


def needless():
    return "numpy.meshgrid returns a list" if isinstance(numpy.meshgrid([0]), list) else ""


def probe():
    import chainer.distributions

    p = numpy.array([[0.25, 0.75], [0.5, 0.5]], numpy.float32)
    x = numpy.array([1, 0])
    log_p = chainer.distributions.Categorical(p=p).log_prob(x)
    numpy.testing.assert_allclose(log_p.array, numpy.log([0.75, 0.5]), rtol=1e-6)
    log_p = chainer.distributions.Categorical(p=p).log_prob(chainer.Variable(x))
    numpy.testing.assert_allclose(log_p.array, numpy.log([0.75, 0.5]), rtol=1e-6)
