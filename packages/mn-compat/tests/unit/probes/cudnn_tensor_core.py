FAKES = ("cupy_14",)
SYMPTOM = "NameError"


def probe():
    import chainer
    import numpy

    assert chainer.should_use_cudnn_tensor_core(numpy.dtype("e")) is False
    with chainer.using_config("use_cudnn_tensor_core", "always"):
        assert chainer.should_use_cudnn_tensor_core(numpy.dtype("e")) is True
