import numpy

SYMPTOM = "cpu"


def needless():
    return "" if hasattr(numpy.ndarray, "device") else "NumPy 1 arrays have no device"


def probe():
    import chainer

    text = chainer.Variable(numpy.ones(3, numpy.float32)).debug_print()
    assert "- device: CPU\n" in text, text
