SYMPTOM = "not enough values to unpack"


def probe():
    import chainer
    import numpy as np

    x = np.ones((2, 3, 4, 4), np.float32)
    weights = chainer.Variable(np.ones((3, 2, 2, 2), np.float32))
    chainer.functions.sum(chainer.functions.deconvolution_2d(x, weights)).backward()
    assert weights.grad.shape == weights.shape
    assert (weights.grad == 32).all(), weights.grad
