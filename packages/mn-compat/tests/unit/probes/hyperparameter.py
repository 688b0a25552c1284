import numpy

SYMPTOM = "float64"


def needless():
    return "" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "NumPy 1 lets a scalar give way"


def probe():
    import chainer
    import chainer.functions as F
    import chainer.links as L

    model = L.Linear(3, 2)
    optimizer = chainer.optimizers.SMORMS3(lr=numpy.float64(0.001), eps=numpy.float64(1e-16)).setup(model)
    x = numpy.ones((4, 3), numpy.float32)
    for _ in range(2):
        optimizer.update(lambda: F.sum(model(x) ** 2))
    for param in model.params():
        for name, state in param.update_rule.state.items():
            assert state.dtype == numpy.float32, f"{name} is {state.dtype}"
    optimizer.lr = numpy.float32(0.5)
    assert type(optimizer.lr) is float, type(optimizer.lr)
